"""Scoring: run an evaluator so that every outcome is a score or a stated error.

An error is never a score of 0: training must be able to drop the item.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import SupportsFloat, SupportsIndex, TypeVar, cast

from insitu.errors import attempt, describe
from insitu.rewards.evaluator import Evaluator, GroupEvaluator
from insitu.rewards.items import EvalItem, EvalResult
from insitu.user_traceback import UserTraceback, user_traceback

Value = TypeVar("Value")

_GRACE_SECONDS = 1.0
"""Time for a cancelled evaluator to clean up before it is abandoned."""
_MAX_ERROR_CHARACTERS = 500


async def score_item(
    evaluator: Evaluator | GroupEvaluator, item: EvalItem, timeout_seconds: float | None
) -> EvalResult:
    """Return the item's score or error; raises only if the caller is cancelled. None means no time limit."""
    if not isinstance(evaluator, Evaluator):
        return _error(item, f"{type(evaluator).__name__} does not score single rollouts")
    try:
        value = await _limited(lambda: evaluator.evaluate_item(item), timeout_seconds)
    except _NoResult as error:
        return _error(item, str(error), error.traceback)
    return _checked(item, value)


async def score_group(
    evaluator: Evaluator | GroupEvaluator, items: Sequence[EvalItem], timeout_seconds: float | None
) -> list[EvalResult]:
    """Return one result per item, in order; an evaluator of single rollouts scores them concurrently."""
    if not items:
        return []
    if isinstance(evaluator, Evaluator):
        return list(await asyncio.gather(*(score_item(evaluator, item, timeout_seconds) for item in items)))
    try:
        given = await _limited(lambda: evaluator.evaluate_group(items), timeout_seconds)
        values = _one_each(given, len(items))
    except _NoResult as error:
        return [_error(item, str(error), error.traceback) for item in items]
    return [_checked(item, value) for item, value in zip(items, values, strict=True)]


def to_result(item: EvalItem, value: object) -> EvalResult:
    """Check that an evaluator returned an `EvalResult` or a number; raise ValueError or TypeError if not."""
    if not isinstance(value, EvalResult):
        return EvalResult(item.id, to_score(value))
    if value.id != item.id:
        raise ValueError(f"the evaluator returned the result of `{value.id}` for `{item.id}`")
    reasoning = _plain(value.reasoning)
    if value.error is not None:
        reason = str(value.error)[:_MAX_ERROR_CHARACTERS] or "the evaluator gave no reason"
        return EvalResult(item.id, None, reasoning, reason, traceback=value.traceback)
    rewards = to_call_rewards(item, value.call_rewards)
    return EvalResult(item.id, to_score(value.score), reasoning, call_rewards=rewards)


def to_call_rewards(item: EvalItem, value: object) -> dict[str, float]:
    """Check for finite floats by ids of the rollout's calls; raise ValueError or TypeError if not."""
    if not isinstance(value, Mapping):
        raise TypeError(f"call_rewards is a {type(value).__name__}, not a mapping of call ids to numbers")
    given = cast("Mapping[object, object]", value)
    if not given:
        return {}
    known = {call.get("id") for call in item.calls}
    if unknown := [key for key in given if key not in known]:
        listed = ", ".join(map(repr, unknown[:3]))
        raise ValueError(f"call_rewards names {listed}, not among the {len(known)} calls of the rollout")
    return {str(call_id): _call_reward(call_id, reward) for call_id, reward in given.items()}


def _call_reward(call_id: object, value: object) -> float:
    try:
        return to_score(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"reward of call {call_id}: {error}") from error


def to_score(value: object) -> float:
    """Convert a score to a finite float: true counts as 1, numpy's numbers are accepted, text never is."""
    if value is None:
        raise ValueError(f"the evaluator returned no score, but None; {_RETURN_A_NUMBER}")
    if not isinstance(value, (SupportsFloat, SupportsIndex)):
        raise TypeError(
            f"the score is a {type(value).__name__}, not a number: {value!r}"[:_MAX_ERROR_CHARACTERS]
            + f"; {_RETURN_A_NUMBER}"
        )
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"the score is {score}, not a finite number; {_RETURN_A_NUMBER}")
    return score


_RETURN_A_NUMBER = "return a number, such as 1.0 for a right answer and 0.0 for a wrong one"


class _NoResult(Exception):
    """The reason why an evaluator returned nothing that can be used."""

    def __init__(self, reason: str, traceback: UserTraceback | None = None) -> None:
        super().__init__(reason)
        self.traceback = traceback


async def _limited(start: Callable[[], Awaitable[Value]], timeout_seconds: float | None) -> Value:
    """Await the evaluator in its own task, so that it cannot block ours by refusing to end."""
    task = asyncio.ensure_future(_contained(start))
    try:
        await asyncio.wait({task}, timeout=timeout_seconds)
    except asyncio.CancelledError:
        await _end(task)
        raise
    if not task.done():
        await _end(task)
        raise _NoResult(f"the evaluator gave no score within {timeout_seconds:g} s")
    if task.cancelled():
        raise _NoResult("the evaluator cancelled itself")
    error = task.exception()
    if error is not None:
        raise _NoResult(describe(error), user_traceback(error)) from error
    return task.result()


async def _contained(start: Callable[[], Awaitable[Value]]) -> Value:
    try:
        return await start()
    except SystemExit as error:
        # Inside a task it would end the whole event loop.
        raise RuntimeError(f"the evaluator called sys.exit({error.code})") from error


async def _end(task: asyncio.Task[Value]) -> None:
    task.cancel()
    task.add_done_callback(_retrieve)
    await asyncio.wait({task}, timeout=_GRACE_SECONDS)


def _retrieve(task: asyncio.Task[Value]) -> None:
    """Retrieve the exception of an abandoned task, or asyncio complains about it later."""
    if not task.cancelled():
        task.exception()


def _one_each(values: object, count: int) -> Sequence[object]:
    if not isinstance(values, (list, tuple)):
        raise _NoResult(f"the evaluator returned a {type(values).__name__}, not a list of results")
    results = cast("Sequence[object]", values)
    if len(results) != count:
        raise _NoResult(f"the evaluator returned {len(results)} results for {count} rollouts")
    return results


def _checked(item: EvalItem, value: object) -> EvalResult:
    return attempt(lambda: to_result(item, value), lambda error: _error(item, describe(error)))


def _error(item: EvalItem, reason: str, traceback: UserTraceback | None = None) -> EvalResult:
    return EvalResult(item.id, None, error=reason, traceback=traceback)


def _plain(reasoning: object) -> object:
    """Turn reasoning that JSON cannot carry into text: it is written to files."""
    try:
        json.dumps(reasoning, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return repr(reasoning)[: 4 * _MAX_ERROR_CHARACTERS]
    return reasoning
