"""The components of this room: importing this module registers them."""
