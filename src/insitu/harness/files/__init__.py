"""The run directory: journal, rollouts, plots."""
