"""The client half: runs the agent over a dataset, scores it, trains through the backend, and repeats."""
