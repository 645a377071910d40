"""Families of models, tiny and random, through the trainer and through vLLM's own classes."""
