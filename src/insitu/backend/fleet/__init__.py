"""The fleet: what holds accelerators. Plain classes here; the supervisor wraps them as Ray actors."""
