"""Reward that combines others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Self

from pydantic import FiniteFloat, model_validator

from insitu.plugins import ComponentConfig, Kind, Parts, register
from insitu.rewards.evaluator import Evaluator, GroupEvaluator
from insitu.rewards.items import EvalItem, EvalResult
from insitu.rewards.score import score_group, score_item


class WeightedConfig(ComponentConfig):
    """Keys of `eval.evaluators` and their weights."""

    evaluators: dict[str, FiniteFloat]
    """The weight of each evaluator, by its key."""

    @model_validator(mode="after")
    def _weights_have_a_mean(self) -> Self:
        if not self.evaluators:
            raise ValueError("evaluators is empty")
        if sum(self.evaluators.values()) <= 0:
            raise ValueError("the weights must add up to more than 0: their sum divides the score")
        return self


class Weighted(Evaluator):
    """The weighted mean of evaluators of single rollouts."""

    def __init__(self, members: Mapping[str, Evaluator], weights: Mapping[str, float]) -> None:
        self._members, self._weights = members, weights

    async def evaluate_item(self, item: EvalItem) -> EvalResult:
        """Return the mean; an error of any member is the item's error."""
        # No time limits here: the overall one covers the members.
        results = await asyncio.gather(*(score_item(member, item, None) for member in self._members.values()))
        return combine(item, dict(zip(self._members, results, strict=True)), self._weights)


class WeightedGroup(GroupEvaluator):
    """The weighted mean when at least one member compares the rollouts of a group."""

    def __init__(
        self, members: Mapping[str, Evaluator | GroupEvaluator], weights: Mapping[str, float]
    ) -> None:
        self._members, self._weights = members, weights

    async def evaluate_group(self, items: Sequence[EvalItem]) -> list[EvalResult]:
        """Return the means; an error of any member on an item is that item's error."""
        results = await asyncio.gather(
            *(score_group(member, items, None) for member in self._members.values())
        )
        return [
            combine(
                item,
                {name: found[at] for name, found in zip(self._members, results, strict=True)},
                self._weights,
            )
            for at, item in enumerate(items)
        ]


@register(Kind.EVALUATOR, "weighted", WeightedConfig)
async def weighted(config: WeightedConfig, parts: Parts) -> AsyncIterator[Evaluator | GroupEvaluator]:
    """Yield a `Weighted`, or a `WeightedGroup` if a member needs whole groups. Members close themselves."""
    members = {name: await parts.evaluator(name) for name in config.evaluators}
    if any(isinstance(member, GroupEvaluator) for member in members.values()):
        yield WeightedGroup(members, config.evaluators)
    else:
        yield Weighted(members, config.evaluators)


def combine(item: EvalItem, results: Mapping[str, EvalResult], weights: Mapping[str, float]) -> EvalResult:
    """Return the weighted mean of the members' scores and rewards of calls, with each score as reasoning."""
    reasoning = {
        name: {"score": result.score, "weight": weights[name], "reasoning": result.reasoning}
        for name, result in results.items()
    }
    errors = [f"{name}: {result.error}" for name, result in results.items() if result.score is None]
    if errors:
        traceback = next((each.traceback for each in results.values() if each.traceback), None)
        return EvalResult(item.id, None, reasoning, "; ".join(errors), traceback=traceback)
    total = sum(weights[name] * (result.score or 0.0) for name, result in results.items())
    rewards: dict[str, float] = {}
    for name, result in results.items():
        for call_id, reward in result.call_rewards.items():
            rewards[call_id] = rewards.get(call_id, 0.0) + weights[name] * reward / sum(weights.values())
    return EvalResult(item.id, total / sum(weights.values()), reasoning, call_rewards=rewards)
