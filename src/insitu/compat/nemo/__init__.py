"""Migrate configurations of the NeMo Agent Toolkit."""
