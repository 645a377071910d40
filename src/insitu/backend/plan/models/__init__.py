"""The size of a model, read before anything starts."""
