"""A run after its training: its description, its adapter elsewhere, merged weights, and a model card."""
