"""The user's agent: running it, its context, and its endings."""
