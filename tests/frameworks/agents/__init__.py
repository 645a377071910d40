"""One small agent per framework, as its users write it; only the LLM object comes from the rollout."""
