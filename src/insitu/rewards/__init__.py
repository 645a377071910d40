"""Rewards: how a rollout becomes a number."""
