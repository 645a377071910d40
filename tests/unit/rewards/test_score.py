"""Whatever an evaluator does ends in a score or an error, never in both and never in a 0 for a failure."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
import warnings
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.errors import InvalidRequest
from insitu.rewards.evaluator import Evaluator, GroupEvaluator
from insitu.rewards.items import EvalItem, EvalResult
from insitu.rewards.score import score_group, score_item, to_score

ITEM = EvalItem("a", "in", "out", "out")


@dataclass
class Returns(Evaluator):
    value: Any

    async def evaluate_item(self, item):
        return EvalResult(item.id, self.value)


@dataclass
class Does(Evaluator):
    function: Any

    async def evaluate_item(self, item):
        value = self.function(item)
        return await value if asyncio.iscoroutine(value) else value


@dataclass
class Group(GroupEvaluator):
    function: Any

    async def evaluate_group(self, items):
        value = self.function(items)
        return await value if asyncio.iscoroutine(value) else value


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (0, 0.0),
        (True, 1.0),
        (False, 0.0),
        (-2.5, -2.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
    ],
)
async def test_numbers_are_scores(value, score):
    result = await score_item(Returns(value), ITEM, 1)
    assert result == EvalResult("a", score)
    assert type(result.score) is float


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (None, "no score"),
        (math.nan, "is nan"),
        (math.inf, "is inf"),
        (-math.inf, "is -inf"),
        (np.float32("nan"), "is nan"),
        ("7", "is a str, not a number: '7'"),
        (b"7", "is a bytes"),
        ([1], "is a list"),
        (10**400, "OverflowError"),
        (1j, "is a complex"),
    ],
)
async def test_what_is_not_a_number_is_an_error(value, complaint):
    result = await score_item(Returns(value), ITEM, 1)
    assert (result.id, result.score) == ("a", None)
    assert complaint in (result.error or "")


@given(st.one_of(st.floats(), st.integers(), st.booleans(), st.none(), st.text(), st.lists(st.floats())))
def test_a_score_is_finite_or_refused(value):
    try:
        assert math.isfinite(to_score(value))
    except (TypeError, ValueError, OverflowError):
        assert not isinstance(value, bool)
        assert not (isinstance(value, (int, float)) and -1e308 < value < 1e308)


def _raise(error):
    raise error


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (lambda item: _raise(KeyError("colour")), "KeyError: 'colour'"),
        (lambda item: _raise(InvalidRequest("no such\nfile", hint="look")), "no such file"),
        (lambda item: _raise(SystemExit(2)), r"sys.exit(2)"),
        (lambda item: _raise(asyncio.CancelledError()), "cancelled itself"),
        (lambda item: _raise(TimeoutError("mine")), "TimeoutError: mine"),
        (lambda item: _raise(ValueError("x" * 10_000)), "ValueError: xxx"),
        (lambda item: EvalResult("b", 1.0), "result of `b` for `a`"),
        (lambda item: EvalResult("a", None, error=""), "gave no reason"),
        (lambda item: EvalResult("a", 1.0, error="broken"), "broken"),
        (lambda item: asyncio.sleep(60), "no score within 0.05 s"),
    ],
)
async def test_failures_are_errors(function, complaint):
    result = await score_item(Does(function), ITEM, 0.05)
    assert (result.id, result.score) == ("a", None)
    assert complaint in (result.error or "")
    assert len(result.error or "") <= 500


async def test_a_plain_number_is_taken():
    assert await score_item(Does(lambda item: 0.25), ITEM, 1) == EvalResult("a", 0.25)


async def test_an_evaluator_that_refuses_to_end_does_not_hold_up_the_harness(monkeypatch):
    monkeypatch.setattr("insitu.rewards.score._GRACE_SECONDS", 0.05)
    release = asyncio.Event()

    async def stubborn(item):
        while not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    started = time.monotonic()
    result = await score_item(Does(stubborn), ITEM, 0.05)
    assert result.error == "the evaluator gave no score within 0.05 s"
    assert time.monotonic() - started < 1
    release.set()
    await asyncio.sleep(0.05)


async def test_cancelling_the_harness_cancels_the_evaluator():
    ended = asyncio.Event()

    async def waits(item):
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    task = asyncio.create_task(score_item(Does(waits), ITEM, 60))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_reasoning_that_json_cannot_carry_becomes_text():
    for reasoning in (object(), math.nan, {"a": {1, 2}}, np.float32(1)):
        result = await score_item(Does(lambda item, r=reasoning: EvalResult("a", 1.0, r)), ITEM, 1)
        json.dumps(result.reasoning, allow_nan=False)
        assert result.score == 1.0


async def test_group_results_are_checked_one_by_one():
    values = [EvalResult("a", 1.0), EvalResult("a", math.nan), EvalResult("a", None, error="dull"), 0.5]
    results = await score_group(Group(lambda items: values), [ITEM] * 4, 1)
    assert [result.score for result in results] == [1.0, None, None, 0.5]
    assert [result.error for result in results][::2] == [None, "dull"]
    assert (results[1].error or "").startswith("ValueError: the score is nan, not a finite number")


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (lambda items: [1.0], "returned 1 results for 2 rollouts"),
        (lambda items: None, "returned a NoneType"),
        (lambda items: _raise(RuntimeError("broken")), "RuntimeError: broken"),
        (lambda items: asyncio.sleep(60), "no score within 0.05 s"),
    ],
)
async def test_a_failed_group_is_an_error_of_every_item(function, complaint):
    results = await score_group(Group(function), [ITEM, ITEM], 0.05)
    assert len(results) == 2
    assert all(result.score is None and complaint in (result.error or "") for result in results)


async def test_groups_of_nothing_and_the_wrong_kind():
    assert await score_group(Group(lambda items: 1 / 0), [], 1) == []
    assert await score_group(Returns(1), [ITEM, ITEM], 1) == [EvalResult("a", 1.0)] * 2
    result = await score_item(Group(lambda items: [1]), ITEM, 1)  # type: ignore[arg-type]
    assert "does not score single rollouts" in (result.error or "")
    assert sys.exc_info() == (None, None, None)


CALLED = EvalItem("a", "in", "out", "out", calls=[{"id": "c1"}, {"id": "c2"}])


async def test_call_rewards_are_plain_floats_by_call():
    given = {"c1": np.float32(0.5), "c2": True}
    result = await score_item(Does(lambda item: EvalResult(item.id, 1, call_rewards=given)), CALLED, 1)
    assert result == EvalResult("a", 1.0, call_rewards={"c1": 0.5, "c2": 1.0})
    assert {type(value) for value in result.call_rewards.values()} == {float}
    assert json.loads(json.dumps(result.call_rewards)) == result.call_rewards


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"c1": 1.0, "c9": 1.0}, "names 'c9', not among the 2 calls"),
        ({0: 1.0}, "names 0, not among"),
        ({"c1": math.nan}, "reward of call c1: the score is nan"),
        ({"c2": -math.inf}, "reward of call c2: the score is -inf"),
        ({"c1": "0.5"}, "reward of call c1: the score is a str"),
        ({"c1": None}, "reward of call c1: the evaluator returned no score"),
        ([0.5, 0.5], "call_rewards is a list, not a mapping"),
    ],
)
async def test_call_rewards_that_cannot_be_used_are_the_error_of_the_item(given, complaint):
    wrong = EvalResult("a", 1.0, call_rewards=given)
    results = await score_group(Group(lambda _: [wrong, EvalResult("a", 2.0)]), [CALLED, CALLED], 1)
    assert complaint in (results[0].error or "")
    assert (results[0].score, results[0].call_rewards) == (None, {})
    assert results[1] == EvalResult("a", 2.0)


async def test_step_rewards_is_the_former_name_of_call_rewards_and_still_works():
    rewards = {"c1": 0.5}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        former = EvalResult("a", 1.0, step_rewards=rewards)
        assert former.step_rewards is former.call_rewards is rewards
    assert former == EvalResult("a", 1.0, call_rewards=rewards) == EvalResult("a", 1.0, None, None, rewards)
    assert (await score_item(Does(lambda item: former), CALLED, 1)).step_rewards == rewards
    assert replace(former, score=2.0).call_rewards == rewards
    assert replace(EvalResult("a", 1.0), step_rewards=rewards) == former
    assert asdict(former)["call_rewards"] == rewards
    assert EvalResult("a", 1.0, step_rewards=None).call_rewards == {}
    with pytest.raises(TypeError, match="former name of call_rewards: give only call_rewards"):
        EvalResult("a", 1.0, call_rewards=rewards, step_rewards={"c2": 1.0})
    with pytest.raises(AttributeError):
        former.score = 2.0  # type: ignore[misc]


async def test_an_evaluator_that_fails_before_it_awaits_is_an_error():
    class NotAsync(Evaluator):
        def evaluate_item(self, item):  # type: ignore[override]
            raise KeyError("colour")

    assert (await score_item(NotAsync(), ITEM, 1)).error == "KeyError: 'colour'"


async def test_a_failure_that_insitu_raised_says_what_to_do_next():
    told = Does(lambda item: _raise(InvalidRequest("no such file", hint="correct file_path")))
    assert (await score_item(told, ITEM, 1)).error == "no such file; correct file_path"
