"""What the engines serve: registration, publication, probe, routing."""
