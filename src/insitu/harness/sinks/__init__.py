"""Sinks: products that get the figures of a run besides its own files."""
