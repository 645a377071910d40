"""The kinds of workflow: a Python function, a command, an HTTP service."""
