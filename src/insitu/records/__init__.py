"""The store of model calls: the gateway writes it, the backend reads it."""
