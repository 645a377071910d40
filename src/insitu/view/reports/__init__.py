"""Runs as files to share."""
