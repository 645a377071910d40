"""Measure on fake tensors what the trainer needs: any model's size, without its memory or its weights."""
