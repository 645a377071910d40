"""Gains: what a model scores, how sure that is, and whether another one scores better. Pure functions."""
