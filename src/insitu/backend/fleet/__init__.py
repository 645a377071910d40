"""The fleet: everything that holds accelerators. Plain classes, wrapped as Ray actors by the supervisor."""
