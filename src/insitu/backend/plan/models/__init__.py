"""The part of a model that is read before anything starts: its size and its parsers."""
