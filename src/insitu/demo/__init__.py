"""The demo: the whole loop on one machine, with a small model that learns to add."""
