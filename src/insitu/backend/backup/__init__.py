"""Backups of a state directory: plain directories, made while the backend runs, and their way back."""
