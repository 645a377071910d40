"""The starts of runs: adapters of PEFT, and their way to the backend."""
