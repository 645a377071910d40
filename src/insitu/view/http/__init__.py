"""The server of `insitu view`: loopback only, read-only, no key."""
