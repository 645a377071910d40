"""LLM objects of agent frameworks for the current rollout: one module each, imported on first use."""
