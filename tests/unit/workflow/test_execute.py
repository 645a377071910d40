"""However a rollout ends, `execute` gives an outcome in time, and nothing of it stays."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
import weakref
from typing import Any

import httpx
import pytest

from insitu.types import Ending
from insitu.workflow.context import WorkflowContext, current_rollout
from insitu.workflow.execute import execute
from insitu.workflow.outcome import Outcome
from insitu.workflow.waiting import num_abandoned
from tests.unit.workflow.conftest import Calls, MakeContext


async def outcome_of(
    function: Any, context: WorkflowContext, value: Any = "in", seconds: float = 5.0, grace: float = 0.1
) -> Outcome:
    async with asyncio.timeout(30):
        return await execute(Calls(function), value, context, seconds, grace_seconds=grace)


async def test_a_result(context: WorkflowContext) -> None:
    async def agent(value: Any, given: WorkflowContext) -> Any:
        assert current_rollout() is given is context
        await asyncio.sleep(0.02)
        return {"said": value, "pair": (1, 2.5, None), 3: "é"}

    outcome = await outcome_of(agent, context)
    assert (outcome.ending, outcome.reason) == (Ending.COMPLETED, "")
    assert outcome.output == {"said": "in", "pair": [1, 2.5, None], "3": "é"}
    assert 0.02 <= outcome.seconds < 1
    with pytest.raises(Exception, match="does not run in a rollout"):
        current_rollout()


async def test_an_agent_cannot_change_its_input_for_others(context: WorkflowContext) -> None:
    async def agent(value: Any, _: WorkflowContext) -> Any:
        value["board"].append("X")
        return value

    shared = {"board": []}
    outcome = await outcome_of(agent, context, shared)
    assert outcome.output == {"board": ["X"]}
    assert shared == {"board": []}


async def test_what_an_agent_changes_later_does_not_reach_the_outcome(context: WorkflowContext) -> None:
    answer = ["right"]

    async def agent(value: Any, _: WorkflowContext) -> Any:
        return answer

    outcome = await outcome_of(agent, context)
    answer.append("later")
    assert outcome.output == ["right"]


async def test_an_exception_is_a_tool_error_in_one_line(context: WorkflowContext) -> None:
    async def agent(value: Any, _: WorkflowContext) -> Any:
        raise KeyError("no such\nsquare\x1b[0m")

    outcome = await outcome_of(agent, context)
    assert (outcome.ending, outcome.output) == (Ending.TOOL_ERROR, None)
    assert outcome.reason == "KeyError: 'no such\\nsquare\\x1b[0m'"


async def test_lost_connections_are_infrastructure(context: WorkflowContext) -> None:
    async def agent(value: Any, _: WorkflowContext) -> Any:
        raise RuntimeError("agent failed") from httpx.ConnectError("refused")

    outcome = await outcome_of(agent, context)
    assert (outcome.ending, outcome.reason) == (Ending.INFRASTRUCTURE, "RuntimeError: agent failed")


@pytest.mark.parametrize(
    ("output", "named"),
    [
        (object(), "object"),
        ({"a": {1, 2}}, "set"),
        (b"bytes", "bytes"),
        (float("nan"), "float"),
        ({"deep": [float("inf")]}, "not JSON"),
        ("\ud800", "surrogates not allowed"),
        ({("a", "b"): 1}, "tuple"),
        (Ending, "type"),
    ],
    ids=str,
)
async def test_output_that_is_not_json(output: Any, named: str, context: WorkflowContext) -> None:
    async def agent(value: Any, _: WorkflowContext) -> Any:
        return output

    outcome = await outcome_of(agent, context)
    assert (outcome.ending, outcome.output) == (Ending.TOOL_ERROR, None)
    assert named in outcome.reason
    assert "is not JSON" in outcome.reason


async def test_output_without_end(context: WorkflowContext) -> None:
    async def agent(value: Any, _: WorkflowContext) -> Any:
        circle: list[Any] = []
        circle.append(circle)
        return circle

    assert "Circular" in (await outcome_of(agent, context)).reason


async def test_a_hang_is_a_timeout(context: WorkflowContext) -> None:
    cleaned: list[str] = []

    async def agent(value: Any, given: WorkflowContext) -> Any:
        given.on_end(lambda: cleaned.append("on_end"))
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append("finally")

    outcome = await outcome_of(agent, context, seconds=0.05)
    assert (outcome.ending, outcome.reason) == (Ending.TIMEOUT, "no result within 0.05 s")
    assert cleaned == ["finally", "on_end"]
    assert 0.05 <= outcome.seconds < 0.5


async def test_an_error_while_stopping_is_told(context: WorkflowContext) -> None:
    async def agent(value: Any, _: WorkflowContext) -> Any:
        try:
            await asyncio.sleep(60)
        finally:
            raise OSError("tidy-up failed")

    outcome = await outcome_of(agent, context, seconds=0.05)
    assert outcome.ending is Ending.TIMEOUT
    assert outcome.reason.endswith("while stopping: OSError: tidy-up failed")


async def test_an_agent_that_ignores_cancellation_is_ended_by_force(context: WorkflowContext) -> None:
    rounds = 0

    async def agent(value: Any, _: WorkflowContext) -> Any:
        nonlocal rounds
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
            rounds += 1

    before = len(asyncio.all_tasks())
    outcome = await outcome_of(agent, context, seconds=0.05)
    assert outcome.ending is Ending.TIMEOUT
    assert "ignored its cancellation for 0.1 s and was ended by force" in outcome.reason
    seen = rounds
    await asyncio.sleep(0.05)
    assert rounds == seen
    assert len(asyncio.all_tasks()) == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the agent's last protest
async def test_an_agent_that_catches_everything_is_ended_by_force(context: WorkflowContext) -> None:
    async def agent(value: Any, _: WorkflowContext) -> Any:
        while True:
            with contextlib.suppress(BaseException):
                await asyncio.sleep(0.01)

    outcome = await outcome_of(agent, context, seconds=0.05)
    assert outcome.ending is Ending.TIMEOUT
    assert "was ended by force" in outcome.reason
    assert num_abandoned() == 0
    gc.collect()


async def test_an_agent_that_nothing_ends_is_abandoned(context: WorkflowContext) -> None:
    release = False

    async def stubborn() -> None:
        while not release:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def agent(value: Any, _: WorkflowContext) -> Any:
        await asyncio.create_task(stubborn())

    started = time.monotonic()
    outcome = await outcome_of(agent, context, seconds=0.05)
    assert time.monotonic() - started < 2
    assert outcome.ending is Ending.TIMEOUT
    assert "abandoned, still running" in outcome.reason
    assert num_abandoned() == 1
    release = True
    async with asyncio.timeout(30):
        while num_abandoned():
            await asyncio.sleep(0.01)


async def test_a_result_after_the_limit_does_not_count(context: WorkflowContext) -> None:
    async def agent(value: Any, _: WorkflowContext) -> Any:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "too late"

    outcome = await outcome_of(agent, context, seconds=0.05)
    assert (outcome.ending, outcome.output) == (Ending.TIMEOUT, None)


async def test_the_harness_is_cancelled_after_the_clean_up(context: WorkflowContext) -> None:
    cleaned: list[str] = []

    async def slow_end() -> None:
        await asyncio.sleep(0.05)
        cleaned.append("on_end")

    async def agent(value: Any, given: WorkflowContext) -> Any:
        given.on_end(slow_end)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)
            cleaned.append("finally")

    task = asyncio.create_task(execute(Calls(agent), "in", context, 60))
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.sleep(0.01)
    task.cancel()  # an impatient second one does not cut the clean-up short
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 30)
    assert cleaned == ["finally", "on_end"]


async def test_cancelling_during_the_clean_up_finishes_it(context: WorkflowContext) -> None:
    started, cleaned = asyncio.Event(), []

    async def slow_end() -> None:
        started.set()
        await asyncio.sleep(0.05)
        cleaned.append("on_end")

    async def agent(value: Any, given: WorkflowContext) -> Any:
        given.on_end(slow_end)

    task = asyncio.create_task(execute(Calls(agent), "in", context, 60))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 30)
    assert cleaned == ["on_end"]


async def test_failed_clean_up_is_in_the_reason(context: WorkflowContext) -> None:
    def broken() -> None:
        raise OSError("still mounted")

    async def agent(value: Any, given: WorkflowContext) -> Any:
        given.on_end(broken)
        return "good"

    outcome = await outcome_of(agent, context)
    assert (outcome.ending, outcome.output) == (Ending.COMPLETED, "good")
    assert outcome.reason.endswith("broken: OSError: still mounted")
    assert "clean-up" in outcome.reason


async def test_sys_exit_ends_the_rollout_only(context: WorkflowContext) -> None:
    async def agent(value: Any, _: WorkflowContext) -> Any:
        sys.exit(3)

    outcome = await outcome_of(agent, context)
    assert outcome.ending is Ending.TOOL_ERROR
    assert "sys.exit(3)" in outcome.reason


async def test_an_agent_that_cancels_itself(context: WorkflowContext) -> None:
    async def agent(value: Any, _: WorkflowContext) -> Any:
        raise asyncio.CancelledError

    outcome = await outcome_of(agent, context)
    assert (outcome.ending, outcome.reason) == (
        Ending.TOOL_ERROR,
        "CancelledError: the agent cancelled itself",
    )


async def test_its_own_timeout_is_not_the_rollouts(context: WorkflowContext) -> None:
    async def agent(value: Any, _: WorkflowContext) -> Any:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(60)

    outcome = await outcome_of(agent, context)
    assert (outcome.ending, outcome.reason) == (Ending.TOOL_ERROR, "TimeoutError")


async def test_rollouts_at_once_know_their_own_context(make_context: MakeContext) -> None:
    async def agent(value: Any, given: WorkflowContext) -> Any:
        await asyncio.sleep(0.01)
        inner = await asyncio.create_task(asyncio.sleep(0, current_rollout().rollout_id))
        return [inner, current_rollout().rollout_id]

    contexts = [make_context(rollout_id=f"r{i}") for i in range(20)]
    outcomes = await asyncio.gather(*(outcome_of(agent, context) for context in contexts))
    assert [outcome.output for outcome in outcomes] == [[f"r{i}", f"r{i}"] for i in range(20)]


@pytest.mark.parametrize("how", ["returns", "raises", "hangs"])
async def test_nothing_of_a_rollout_stays(how: str, make_context: MakeContext) -> None:
    class Big:
        pass

    async def agent(value: Any, given: WorkflowContext) -> Any:
        big = Big()
        references.append(weakref.ref(big))
        given.on_end(lambda big=big: None)
        if how == "raises":
            raise ValueError("x")
        if how == "hangs":
            await asyncio.sleep(60)
        return "done"

    references: list[weakref.ref[Any]] = []
    context = make_context()
    references.append(weakref.ref(context))
    outcome = await outcome_of(agent, context, seconds=0.05)
    assert (
        outcome.ending
        is {
            "returns": Ending.COMPLETED,
            "raises": Ending.TOOL_ERROR,
            "hangs": Ending.TIMEOUT,
        }[how]
    )
    del context
    gc.collect()
    assert [reference() for reference in references] == [None, None]
