"""Scoring: run an evaluator so that every outcome is a score or a stated error.

An error is never a score of 0: training must be able to drop the item.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, cast

from insitu.errors import InsituError
from insitu.rewards.evaluator import Evaluator, GroupEvaluator
from insitu.rewards.items import EvalItem, EvalResult

_GRACE_SECONDS = 1.0
"""Time for a cancelled evaluator to clean up before it is abandoned."""
_MAX_ERROR_CHARACTERS = 500


async def score_item(evaluator: Evaluator, item: EvalItem, timeout_seconds: float | None) -> EvalResult:
    """Return the item's score or error; raises only if the caller is cancelled. None means no time limit."""
    if not isinstance(evaluator, Evaluator):
        return _error(item, f"{type(evaluator).__name__} does not score single rollouts")
    try:
        return to_result(item, await _limited(evaluator.evaluate_item(item), timeout_seconds))
    except Exception as error:  # noqa: BLE001 - whatever an evaluator raises is the item's error
        return _error(item, describe(error))


async def score_group(
    evaluator: Evaluator | GroupEvaluator, items: Sequence[EvalItem], timeout_seconds: float | None
) -> list[EvalResult]:
    """Return one result per item, in order; an evaluator of single rollouts scores them concurrently."""
    if not items:
        return []
    if isinstance(evaluator, Evaluator):
        return list(await asyncio.gather(*(score_item(evaluator, item, timeout_seconds) for item in items)))
    try:
        values = await _limited(evaluator.evaluate_group(items), timeout_seconds)
        if not isinstance(values, (list, tuple)):
            raise TypeError(f"the evaluator returned a {type(values).__name__}, not a list of results")
        if len(values) != len(items):
            raise ValueError(f"the evaluator returned {len(values)} results for {len(items)} rollouts")
        return [_checked(item, value) for item, value in zip(items, values, strict=True)]
    except Exception as error:  # noqa: BLE001 - whatever an evaluator raises is the error of all its items
        return [_error(item, describe(error)) for item in items]


def to_result(item: EvalItem, value: Any) -> EvalResult:
    """Check that an evaluator returned an `EvalResult` or a number; raise ValueError or TypeError if not."""
    if not isinstance(value, EvalResult):
        return EvalResult(item.id, to_score(value))
    if value.id != item.id:
        raise ValueError(f"the evaluator returned the result of `{value.id}` for `{item.id}`")
    reasoning = _plain(value.reasoning)
    if value.error is not None:
        return EvalResult(
            item.id, None, reasoning, str(value.error)[:_MAX_ERROR_CHARACTERS] or "no reason given"
        )
    steps = to_step_rewards(item, value.step_rewards)
    return EvalResult(item.id, to_score(value.score), reasoning, step_rewards=steps)


def to_step_rewards(item: EvalItem, value: Any) -> dict[str, float]:
    """Check for finite floats by ids of the rollout's calls; raise ValueError or TypeError if not."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"step_rewards is a {type(value).__name__}, not a mapping of call ids to numbers")
    given = cast("Mapping[Any, Any]", value)
    known = {call.get("id") for call in item.calls}
    if unknown := [key for key in given if key not in known]:
        listed = ", ".join(map(repr, unknown[:3]))
        raise ValueError(f"step_rewards names {listed}, not among the {len(known)} calls of the rollout")
    return {call_id: _step_reward(call_id, reward) for call_id, reward in given.items()}


def _step_reward(call_id: str, value: Any) -> float:
    try:
        return to_score(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"step reward of call {call_id}: {error}") from error


def to_score(value: Any) -> float:
    """Convert a score to a finite float: true counts as 1, numpy's numbers are accepted, text never is."""
    if value is None:
        raise ValueError("the evaluator returned no score")
    if not hasattr(type(value), "__float__") and not hasattr(type(value), "__index__"):
        raise TypeError(
            f"the score is a {type(value).__name__}, not a number: {value!r}"[:_MAX_ERROR_CHARACTERS]
        )
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"the score is {score}")
    return score


def describe(error: BaseException) -> str:
    """Describe an error in one line."""
    text = error.message if isinstance(error, InsituError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:_MAX_ERROR_CHARACTERS]


async def _limited(work: Coroutine[Any, Any, Any], timeout_seconds: float | None) -> Any:
    """Await the evaluator in its own task, so that it cannot block ours by refusing to end."""
    task = asyncio.ensure_future(_contained(work))
    try:
        await asyncio.wait({task}, timeout=timeout_seconds)
    except asyncio.CancelledError:
        await _end(task)
        raise
    if not task.done():
        await _end(task)
        raise TimeoutError(f"no score within {timeout_seconds:g} s")
    if task.cancelled():
        raise RuntimeError("the evaluator cancelled itself")
    return task.result()


async def _contained(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await work
    except SystemExit as error:
        # Inside a task it would end the whole event loop.
        raise RuntimeError(f"the evaluator called sys.exit({error.code})") from error


async def _end(task: asyncio.Future[Any]) -> None:
    task.cancel()
    task.add_done_callback(_retrieve)
    await asyncio.wait({task}, timeout=_GRACE_SECONDS)


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of an abandoned task, or asyncio complains about it later."""
    if not task.cancelled():
        task.exception()


def _checked(item: EvalItem, value: Any) -> EvalResult:
    try:
        return to_result(item, value)
    except Exception as error:  # noqa: BLE001 - one bad result leaves the others of the group as they are
        return _error(item, describe(error))


def _error(item: EvalItem, reason: str) -> EvalResult:
    return EvalResult(item.id, None, error=reason)


def _plain(reasoning: Any) -> Any:
    """Turn reasoning that JSON cannot carry into text: it is written to files."""
    try:
        json.dumps(reasoning, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return repr(reasoning)[: 4 * _MAX_ERROR_CHARACTERS]
    return reasoning
