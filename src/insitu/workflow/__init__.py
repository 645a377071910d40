"""The user's agent: how it is run, what it is told, how it ends."""
