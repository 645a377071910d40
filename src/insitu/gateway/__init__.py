"""The gateway: OpenAI-protocol calls in, engine tokens recorded, answers out."""
