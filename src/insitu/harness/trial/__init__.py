"""`insitu try`: a few real rollouts and rewards, with nothing trained and nothing written."""
