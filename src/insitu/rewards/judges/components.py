"""Register the built-in judges: importing this module does it."""

from insitu.rewards.judges import group_judge, llm_judge

__all__ = ["group_judge", "llm_judge"]
