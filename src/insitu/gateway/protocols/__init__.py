"""The client protocols: how each one is read, rendered, and answered."""
