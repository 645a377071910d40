"""Read a run directory while the run may be under way, and keep an index of its rollouts."""
