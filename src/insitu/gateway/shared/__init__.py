"""Shared by all parts of the gateway: its limits, and whose fault an error is."""
