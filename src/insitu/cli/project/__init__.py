"""Commands for a project before its first run."""
