"""The served state of the engines: registration, publication, probe, routing."""
