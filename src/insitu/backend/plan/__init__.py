"""The plan of a backend: the machine, the settings, and what follows for engines and trainer."""
