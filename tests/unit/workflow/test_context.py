"""What an agent is told about its rollout."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from insitu.errors import InsituError, InvalidRequest, NotFound
from insitu.workflow.binding import LLMBinding
from insitu.workflow.context import WorkflowContext, current_rollout, entered
from tests.unit.workflow.conftest import BINDING, Calls, Entry, MakeContext, config


def test_the_llm_without_a_name(make_context: MakeContext) -> None:
    assert make_context().llm().name == "policy"  # the trained one
    assert make_context(config=config(llm="judge-1")).llm().name == "judge-1"  # its own
    assert make_context(binding=LLMBinding({"only": Entry()})).llm().name == "only"
    two = LLMBinding({"a": Entry(), "b": Entry()})
    with pytest.raises(InvalidRequest, match="does not say which entry of `llms` it uses; known: a, b"):
        make_context(binding=two).llm()
    with pytest.raises(InvalidRequest, match="none"):
        make_context(binding=LLMBinding({})).llm()
    assert make_context(binding=two).llm("b").name == "b"


def test_calls_carry_the_function(context: WorkflowContext) -> None:
    assert context.llm().base_url == "http://gateway:8000/rollouts/r1/v1"
    assert context.headers == {"x-insitu-rollout": "r1", "x-insitu-function": "<workflow>"}
    inner = context.in_function("plan")
    assert inner.llm().base_url == "http://gateway:8000/rollouts/r1/functions/plan/v1"
    assert inner.headers["x-insitu-function"] == "plan"
    assert (inner.rollout_id, inner.example_id, inner.config) == ("r1", "e1", context.config)


async def test_call_runs_a_function_with_its_own_context(make_context: MakeContext) -> None:
    async def plan(value: Any, inner: WorkflowContext) -> Any:
        assert current_rollout() is inner
        inner.on_end(lambda: ended.append(inner.function))
        return [value, inner.function, inner.llm().name, inner.rollout_id, await inner.call("other", value)]

    async def other(value: Any, inner: WorkflowContext) -> Any:
        assert current_rollout() is inner
        return inner.function

    ended: list[str] = []
    functions = {
        "plan": (Calls(plan), config(llm="judge-1")),
        "other": (Calls(other), config()),
    }
    context = make_context(functions=functions)
    with entered(context):
        assert await context.call("plan", 7) == [7, "plan", "judge-1", "r1", "other"]
        assert current_rollout() is context
    assert await context.close() == []
    assert ended == ["plan"]  # clean-up belongs to the rollout, not to the function


async def test_call_raises_what_the_function_raises(make_context: MakeContext) -> None:
    async def fail(value: Any, inner: WorkflowContext) -> Any:
        raise KeyError(value)

    context = make_context(functions={"fail": (Calls(fail), config())})
    with pytest.raises(KeyError, match="x"):
        await context.call("fail", "x")
    with pytest.raises(NotFound, match="did you mean `fail`"):
        await context.call("fial", "x")


def test_environment(context: WorkflowContext) -> None:
    url = "http://gateway:8000/rollouts/r1/v1"
    assert context.environment() == {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_BASE": url,
        "OPENAI_API_KEY": "gateway-key",
        "OPENAI_MODEL": "my-run",
        "ANTHROPIC_BASE_URL": "http://gateway:8000/rollouts/r1",
        "ANTHROPIC_API_KEY": "gateway-key",
        "ANTHROPIC_MODEL": "my-run",
        "INSITU_MODEL": "my-run",
        "INSITU_ROLLOUT_ID": "r1",
        "INSITU_LLM_POLICY_BASE_URL": url,
        "INSITU_LLM_POLICY_API_KEY": "gateway-key",
        "INSITU_LLM_POLICY_MODEL": "my-run",
        "INSITU_LLM_JUDGE_1_BASE_URL": "http://judge:9000/v1",
        "INSITU_LLM_JUDGE_1_API_KEY": "judge-key",
        "INSITU_LLM_JUDGE_1_MODEL": "big",
    }


def test_environment_of_a_function(context: WorkflowContext) -> None:
    variables = context.in_function("plan").environment()
    assert variables["OPENAI_BASE_URL"] == "http://gateway:8000/rollouts/r1/functions/plan/v1"
    assert variables["ANTHROPIC_BASE_URL"] == "http://gateway:8000/rollouts/r1/functions/plan"


def test_environment_off_the_gateway(make_context: MakeContext) -> None:
    variables = make_context(config=config(llm="judge-1")).environment()
    assert variables["OPENAI_BASE_URL"] == "http://judge:9000/v1"
    assert not [name for name in variables if name.startswith("ANTHROPIC")]


def test_environment_without_llms(make_context: MakeContext) -> None:
    assert make_context(binding=LLMBinding({})).environment() == {"INSITU_ROLLOUT_ID": "r1"}


def test_outside_a_rollout() -> None:
    with pytest.raises(InsituError, match="does not run in a rollout"):
        current_rollout()


async def test_clean_up_runs_last_first_and_loses_no_error(context: WorkflowContext) -> None:
    order: list[int] = []

    async def slow() -> None:
        order.append(2)
        await asyncio.sleep(0.01)
        raise ValueError("broken\nclean-up")

    context.on_end(lambda: order.append(1))
    context.on_end(slow)
    context.on_end(lambda: exec("raise SystemExit(3)"))
    troubles = await context.close()
    assert order == [2, 1]
    assert len(troubles) == 2
    assert "sys.exit(3)" in troubles[0]
    assert troubles[1].endswith("slow: ValueError: broken clean-up")
    assert await context.close() == []  # each once
    with pytest.raises(InsituError, match="has ended"):
        context.on_end(lambda: None)


async def test_clean_up_has_a_deadline(context: WorkflowContext, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang() -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr("insitu.workflow.cleanup.EACH_SECONDS", 0.05)
    context.on_end(hang)
    async with asyncio.timeout(30):
        (trouble,) = await context.close()
    assert "hang: not done after 0.1 s" in trouble or "hang: not done after 0.0 s" in trouble


async def test_clean_up_of_a_thread_runs_in_a_thread(
    context: WorkflowContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocking clean-up must not stop the event loop, and has a deadline too."""
    import threading

    monkeypatch.setattr("insitu.workflow.cleanup.EACH_SECONDS", 0.05)
    release = threading.Event()
    await asyncio.to_thread(context.on_end, lambda: release.wait(30) and None)
    async with asyncio.timeout(30):
        (trouble,) = await context.close()
    release.set()
    assert "not done after" in trouble


def test_two_trained_ones_need_a_name(make_context: MakeContext) -> None:
    both = LLMBinding({"a": Entry(), "b": Entry()}, frozenset({"a", "b"}), "m", "http://g", "k")
    with pytest.raises(InvalidRequest, match="set `llm: <name>`"):
        make_context(binding=both).llm()
    assert BINDING.trained == {"policy"}


async def test_tasks_that_outlive_their_rollout_are_told(make_context: MakeContext) -> None:
    go, stray = asyncio.Event(), []

    async def later() -> str:
        await go.wait()
        return current_rollout().function

    async def plan(value: Any, inner: WorkflowContext) -> Any:
        stray.append(asyncio.create_task(later()))

    async def run_plan(context: WorkflowContext) -> None:
        with entered(context):
            await context.call("plan", 1)

    functions = {"plan": (Calls(plan), config())}
    context = make_context(functions=functions)
    await run_plan(context)
    go.set()
    assert await stray.pop() == "plan"  # the rollout still goes on
    go.clear()
    await run_plan(context)
    await context.close()
    del context
    go.set()
    with pytest.raises(InvalidRequest, match="has ended"):
        await stray.pop()
