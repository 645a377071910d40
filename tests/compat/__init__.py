"""Clients of others, unmodified, in environments of their own, against this checkout's backend."""
