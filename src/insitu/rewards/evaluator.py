"""Evaluator: turns what a rollout did into a number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from insitu.rewards.items import EvalItem, EvalResult


class Evaluator(ABC):
    """Scores one rollout at a time."""

    @abstractmethod
    async def evaluate_item(self, item: EvalItem) -> EvalResult:
        """Score the item, or return its error. Raising is the same as returning an error."""


class GroupEvaluator(ABC):
    """Scores all rollouts of one example together, relative to each other."""

    @abstractmethod
    async def evaluate_group(self, items: Sequence[EvalItem]) -> list[EvalResult]:
        """Return one result per item, in order."""
