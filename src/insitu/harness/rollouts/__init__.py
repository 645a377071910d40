"""The rollout as the harness knows it, from the collector to the upload."""
