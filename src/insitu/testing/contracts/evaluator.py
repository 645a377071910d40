"""The contracts of evaluators."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import cast

from insitu.rewards.evaluator import Evaluator, GroupEvaluator
from insitu.rewards.items import EvalItem, EvalResult
from insitu.testing.contracts.contract import Contract, assert_json, closes_twice, opened

_AT_ONCE = 16
_ODD_OUTPUTS: tuple[object, ...] = (None, "", 12, [], {"a": [1]}, "\N{GRINNING FACE}" * 1000)


class EvaluatorContract(Contract):
    """For an `Evaluator`."""

    deterministic: bool = True
    """True if the same item always gets the same score."""

    def item(self) -> EvalItem:
        """Return an item that can be scored."""
        return EvalItem("example", "question", "answer", "answer", {"id": "example"}, (), "rollout")

    def unscorable(self) -> EvalItem | None:
        """Return an item that cannot be scored; None if there is none."""
        return None

    def test_it_is_an_evaluator(self) -> None:
        async def test() -> None:
            async with opened(self.make()) as evaluator:
                assert isinstance(evaluator, Evaluator), "subclass insitu.rewards.evaluator.Evaluator"

        self.within_deadline(test)

    def test_an_item_gets_a_score(self) -> None:
        async def test() -> None:
            item = self.item()
            async with opened(self.make()) as evaluator:
                result = await evaluator.evaluate_item(item)
            assert_result(result, item)
            assert result.error is None, f"`item` must be one that can be scored: {result.error}"

        self.within_deadline(test)

    def test_items_are_scored_side_by_side(self) -> None:
        async def test() -> None:
            item = self.item()
            items = [replace(item, id=f"{item.id}-{n}", rollout_id=f"rollout-{n}") for n in range(_AT_ONCE)]
            async with opened(self.make()) as evaluator:
                alone = await evaluator.evaluate_item(items[0])
                results = await asyncio.gather(*map(evaluator.evaluate_item, items))
            for result, each in zip(results, items, strict=True):
                assert_result(result, each)
                assert result.error is None, f"{_AT_ONCE} at once fail where one succeeds: {result.error}"
            if self.deterministic:
                same = f"the score must not depend on what else runs; alone: {alone}; at once: {results[0]}"
                assert results[0].score == alone.score, same

        self.within_deadline(test)

    def test_an_item_that_cannot_be_scored_is_an_error_and_never_a_zero(self) -> None:
        async def test() -> None:
            item = self.unscorable()
            if item is None:
                return
            async with opened(self.make()) as evaluator:
                for _ in range(2):
                    result = await _result_or_none(evaluator, item)
                    if result is not None:
                        assert_result(result, item)
                        assert result.error, f"an item that cannot be scored must be an error, not {result}"

        self.within_deadline(test)

    def test_whatever_the_agent_returned_gives_a_score_or_an_error(self) -> None:
        async def test() -> None:
            async with opened(self.make()) as evaluator:
                for output in _ODD_OUTPUTS:
                    item = replace(self.item(), output=output)
                    result = await _result_or_none(evaluator, item)
                    if result is not None:
                        assert_result(result, item)

        self.within_deadline(test)

    def test_the_item_stays_as_it_was(self) -> None:
        async def test() -> None:
            item = self.item()
            before = copy.deepcopy(item)
            async with opened(self.make()) as evaluator:
                await evaluator.evaluate_item(item)
            assert item == before, "an evaluator must not change the item: other evaluators see it too"

        self.within_deadline(test)

    def test_closing_twice_is_fine(self) -> None:
        async def test() -> None:
            async with opened(self.make()) as evaluator:
                await evaluator.evaluate_item(self.item())
                await closes_twice(evaluator)

        self.within_deadline(test)


class GroupEvaluatorContract(Contract):
    """For a `GroupEvaluator`."""

    deterministic: bool = True
    """True if the same rollouts get the same scores, in whatever order they are given."""

    def group(self) -> list[EvalItem]:
        """Return three or more rollouts of one example, of different quality, that can be scored together."""
        row = {"id": "example", "question": "question", "answer": "answer"}
        outputs = ("answer", "an answer", "something else")
        return [
            EvalItem("example", "question", "answer", output, row, (), f"rollout-{n}")
            for n, output in enumerate(outputs)
        ]

    def unscorable(self) -> list[EvalItem] | None:
        """Return a group that cannot be scored; None if there is none."""
        return None

    def test_it_is_a_group_evaluator(self) -> None:
        async def test() -> None:
            async with opened(self.make()) as evaluator:
                right = isinstance(evaluator, GroupEvaluator)
                assert right, "subclass insitu.rewards.evaluator.GroupEvaluator"

        self.within_deadline(test)

    def test_one_result_per_rollout_in_order(self) -> None:
        async def test() -> None:
            group = self.group()
            async with opened(self.make()) as evaluator:
                results = await evaluator.evaluate_group(group)
                turned = await evaluator.evaluate_group(group[::-1])
            assert_results(results, group)
            assert_results(turned, group[::-1])
            if self.deterministic:
                scores, expected = [each.score for each in turned], [each.score for each in results[::-1]]
                assert scores == expected, f"results must follow their rollouts: {scores}, not {expected}"

        self.within_deadline(test)

    def test_a_group_of_one(self) -> None:
        async def test() -> None:
            async with opened(self.make()) as evaluator:
                assert_results(await evaluator.evaluate_group(self.group()[:1]), self.group()[:1])

        self.within_deadline(test)

    def test_groups_are_scored_side_by_side(self) -> None:
        async def test() -> None:
            groups = [[replace(each, id=f"example-{n}") for each in self.group()] for n in range(_AT_ONCE)]
            async with opened(self.make()) as evaluator:
                found = await asyncio.gather(*map(evaluator.evaluate_group, groups))
            for results, group in zip(found, groups, strict=True):
                assert_results(results, group)

        self.within_deadline(test)

    def test_a_group_that_cannot_be_scored_is_an_error_and_never_zeros(self) -> None:
        async def test() -> None:
            group = self.unscorable()
            if group is None:
                return
            async with opened(self.make()) as evaluator:
                work: Awaitable[object] = evaluator.evaluate_group(group)
                made = await asyncio.gather(work, return_exceptions=True)
            if not isinstance(made[0], Exception):  # raising is the same as returning errors
                assert_results(made[0], group)
                results = cast("list[EvalResult]", made[0])
                assert all(each.error for each in results), f"each must be an error, not {results}"

        self.within_deadline(test)

    def test_the_items_stay_as_they_were(self) -> None:
        async def test() -> None:
            group = self.group()
            before = copy.deepcopy(group)
            async with opened(self.make()) as evaluator:
                await evaluator.evaluate_group(group)
            assert group == before, "an evaluator must not change the items: other evaluators see them too"

        self.within_deadline(test)

    def test_closing_twice_is_fine(self) -> None:
        async def test() -> None:
            async with opened(self.make()) as evaluator:
                await evaluator.evaluate_group(self.group())
                await closes_twice(evaluator)

        self.within_deadline(test)


def assert_result(result: object, item: EvalItem) -> None:
    """Check that the result is a score or an error, of this item."""
    assert isinstance(result, EvalResult), f"the result must be an EvalResult, not {result!r}"
    assert result.id == item.id, f"the result must carry the item's id {item.id!r}, not {result.id!r}"
    assert (result.score is None) == (result.error is not None), f"a score or an error, never both: {result}"
    if result.score is not None:
        assert _is_finite(result.score), f"the score must be a finite number: {result}"
    assert_json(result.reasoning, "the reasoning")
    known = {call.get("id") for call in item.calls}
    for call_id, reward in result.call_rewards.items():
        assert call_id in known, f"call_rewards must name calls of the rollout, not {call_id!r}"
        assert _is_finite(reward), f"a call reward must be a finite number: {reward!r} for {call_id}"


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def assert_results(results: object, group: Sequence[EvalItem]) -> None:
    """Check that there is one result per item."""
    assert isinstance(results, list), f"the results must be a list, not {results!r}"
    results = cast("list[object]", results)
    assert len(results) == len(group), f"one result per rollout: {len(results)} for {len(group)}"
    for result, item in zip(results, group, strict=True):
        assert_result(result, item)


async def _result_or_none(evaluator: Evaluator, item: EvalItem) -> EvalResult | None:
    """Return the result, or None if the evaluator raised, which is the same as returning an error."""
    (result,) = await asyncio.gather(evaluator.evaluate_item(item), return_exceptions=True)
    return result if isinstance(result, EvalResult) else None
