"""Rewards by a model that judges."""
