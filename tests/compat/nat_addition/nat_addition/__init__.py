"""The addition task, written for the NeMo Agent Toolkit as its users write workflows and evaluators."""
