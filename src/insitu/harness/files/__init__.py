"""The run directory: journal, rollouts, metrics, plots."""
