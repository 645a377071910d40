"""What every framework's agent must pass: eight rollouts at once in one process, none mixed up.

Nothing here imports vLLM or torch: a gateway is reached by its address, so that frameworks which do not fit
into one environment with the backend are checked in another.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import SecretStr

import insitu
from insitu.client import InsituClient
from insitu.gateway_client import GatewayClient, RolloutRecord
from insitu.types import Ending, StepSettings, Trajectory, TrajectoryGroup
from insitu.wire.listed_calls import expand
from insitu.workflow.binding import LLMBinding
from insitu.workflow.context import WorkflowContext
from insitu.workflow.execute import execute
from insitu.workflow.kinds.function import FunctionWorkflow
from insitu.workflow.kinds.registered import RegisteredConfig
from insitu.workflow.outcome import Outcome
from insitu.workflow.workflow import Workflow
from tests.support.standin_engine import Behaviour
from tests.support.standin_tools import measured

Agent = Callable[..., Any]

KEY = "default"
NUM_ROLLOUTS = 8
ROLLOUT_SECONDS = 60.0
FUNCTION = "asker"
"""Agents run in this function; their LLM objects are made outside of it."""


@dataclass
class Entry:
    """An entry of `llms` as the YAML gives it."""

    options: dict[str, Any]
    model_name: str = "tiny"
    api_key: SecretStr = field(default_factory=lambda: SecretStr(KEY))
    base_url: str | None = None
    max_retries: int = 2
    request_timeout: float | None = 50.0


@dataclass(frozen=True)
class Rollout:
    """One finished rollout and what the gateway holds of it."""

    id: str
    thing: str
    outcome: Outcome
    record: RolloutRecord
    calls: list[dict[str, Any]]


async def run_rollouts(
    name: str, agent: Agent, gateway_url: str, run: str, options: dict[str, Any]
) -> list[Rollout]:
    """Eight rollouts at once, each with a thing of its own to ask about."""
    return await run_workflow(
        name, FunctionWorkflow(name, insitu.function(FUNCTION)(agent)), gateway_url, run, options
    )


async def run_workflow(
    name: str, workflow: Workflow, gateway_url: str, run: str, options: dict[str, Any]
) -> list[Rollout]:
    """The same for a workflow of any kind."""
    binding = LLMBinding({"policy": Entry(options)}, frozenset({"policy"}), run, gateway_url, KEY)
    async with GatewayClient(gateway_url, KEY) as gateway:

        async def one() -> Rollout:
            thing = f"thing-{uuid.uuid4().hex[:8]}"
            context = WorkflowContext(
                rollout_id=f"{name}-{uuid.uuid4().hex}",
                example_id=name,
                config=RegisteredConfig.model_validate({"_type": name}),
                binding=binding,
            )
            outcome = await execute(workflow, f"How heavy is {thing}?", context, ROLLOUT_SECONDS)
            record = await gateway.rollout_record(context.rollout_id)
            return Rollout(context.rollout_id, thing, outcome, record, expand(record.calls))

        return await asyncio.gather(*[one() for _ in range(NUM_ROLLOUTS)])


async def check_scripted(
    name: str,
    agent: Agent,
    gateway_url: str,
    run: str = "run",
    *,
    function: str = FUNCTION,
    tool_calls: bool = True,
) -> None:
    """In front of the scripted stand-in: who asked what, and every message, stays together.

    `function`: the one that calls are expected under; `<workflow>` for clients that cannot follow it.
    `tool_calls`: False for frameworks that write tool calls as text of their own.
    """
    rollouts = await run_rollouts(name, agent, gateway_url, run, {"temperature": 0.7, "max_tokens": 300})
    things = {rollout.thing for rollout in rollouts}
    for rollout in rollouts:
        assert rollout.outcome.ending is Ending.COMPLETED, f"{name}: {rollout.outcome.reason}"
        assert measured(rollout.thing) in rollout.outcome.output, f"{name}: {rollout.outcome.output}"
        check_recorded(name, rollout, things, run, function)
        assert len(rollout.calls) >= 2
        assert all(call["sampling"]["temperature"] == 0.7 for call in rollout.calls), (
            "the YAML's options hold"
        )
        assert all(call["sampling"]["max_tokens"] == 300 for call in rollout.calls)
        if tool_calls:
            check_tool_messages(name, rollout)


async def check_endings(name: str, agent: Agent, gateway_url: str, behaviour: Behaviour) -> None:
    """What the framework raises still tells a conversation that is too long from an engine that fails."""
    for fault, ending in (("overflow", Ending.CONTEXT_OVERFLOW), ("500", Ending.INFRASTRUCTURE)):
        behaviour.fault = fault
        for rollout in await run_rollouts(name, agent, gateway_url, "run", {"max_tokens": 300}):
            assert rollout.outcome.ending is ending, f"{name}: {rollout.outcome}"
            assert not rollout.calls
            assert rollout.record.seen == sum(rollout.record.unrecorded.values()) > 0, name


def check_recorded(name: str, rollout: Rollout, things: set[str], run: str, function: str | None) -> None:
    """Every call that was made is there, whole, under its rollout and function, with its own thing only."""
    record, calls = rollout.record, rollout.calls
    assert record.seen == len(calls), f"{name}: {record.seen} calls seen, {len(calls)} recorded"
    assert not record.unrecorded, f"{name}: {record.unrecorded}"
    assert record.under_way == 0
    for call in calls:
        assert (call["rollout_id"], call["function"], call["run"]) == (rollout.id, function, run), name
        assert len(call["output_ids"]) == len(call["logprobs"]) > 0
        assert call["prompt_ids"]
        text = json.dumps(call["messages"])
        assert rollout.thing in text, f"{name}: {text}"
        assert not [other for other in things - {rollout.thing} if other in text], f"{name}: mixed up"


def check_tool_messages(name: str, rollout: Rollout) -> None:
    """The call of the tool, its result and the text around them are kept as they went to the model."""
    first, last = rollout.calls[0], rollout.calls[-1]
    assert any("measure" in tool["function"]["name"] for tool in first["tools"]), name
    (made,) = first["answer"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"thing": rollout.thing}
    kept = [message for message in last["messages"] if message.get("tool_calls")]
    (sent,) = kept[-1]["tool_calls"]
    assert sent["function"]["name"] == made["function"]["name"], name
    assert json.loads(sent["function"]["arguments"]) == json.loads(made["function"]["arguments"]), name
    (result,) = [message for message in last["messages"] if message["role"] == "tool"]
    assert result["tool_call_id"] == sent["id"], name
    assert measured(rollout.thing) in text_of(result), name
    roles = [message["role"] for message in last["messages"]]
    assert roles.index("user") < roles.index("assistant") < roles.index("tool"), name
    system = text_of(last["messages"][0])
    assert "You measure things with the tool." in system, f"{name}: {system}"
    assert measured(rollout.thing) in text_of(last["answer"]), name


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


async def collect_group(
    name: str, agent: Agent, gateway_url: str, run: str, *, function: str = FUNCTION
) -> TrajectoryGroup:
    """Eight rollouts against a real model, whatever it says: recorded as above, and a group to train on."""
    options = {"temperature": 1.0, "max_tokens": 16, "stop": ["a"]}
    rollouts = await run_rollouts(name, agent, gateway_url, run, options)
    return group_of(name, rollouts, run, function)


def group_of(name: str, rollouts: Sequence[Rollout], run: str, function: str | None) -> TrajectoryGroup:
    """Rollouts that ended somehow and are recorded as they should be, every second one with a reward."""
    things = {rollout.thing for rollout in rollouts}
    trajectories: list[Trajectory] = []
    for i, rollout in enumerate(rollouts):
        ending, reason = rollout.outcome.ending, rollout.outcome.reason
        assert ending in (Ending.COMPLETED, Ending.TOOL_ERROR), f"{name}: {ending}: {reason}"
        assert rollout.calls, f"{name}: no call was made: {reason}"
        check_recorded(name, rollout, things, run, function)
        ids = [call["id"] for call in rollout.calls]
        trajectories.append(Trajectory(rollout.id, ids, reward=float(i % 2)))
    return TrajectoryGroup(uuid.uuid4().hex, run, trajectories)


@asynccontextmanager
async def open_run(client: InsituClient, run: str) -> AsyncIterator[None]:
    """A run that is closed afterwards: without a GPU one run is served at a time."""
    await client.register_run(run, "tiny")
    try:
        await client.wait_run_ready(run, 400)
        yield
    finally:
        await client.close_run(run)


async def check_step(
    client: InsituClient, run: str, groups: Sequence[TrajectoryGroup], settings: StepSettings | None = None
) -> None:
    """One step on all groups of an open run: every call is trained on, exactly as it was sampled."""
    for group in groups:
        await client.put_group(group)
    ids = [group.id for group in groups]
    job = await client.submit_step(run, ids, settings or StepSettings(), idempotency_key=f"{run}-step-1")
    done = await client.wait_job(job.id, deadline_seconds=120)
    figures = done.metrics
    num_calls = sum(len(trajectory.call_ids) for group in groups for trajectory in group.trajectories)
    assert done.step == 1
    assert figures["account/groups"] == len(groups)
    assert figures["account/calls"] == num_calls
    assert figures["account/calls_trained"] + figures["account/calls_truncated"] == num_calls
    assert figures["account/trained"] >= 0.8 * sum(len(group.trajectories) for group in groups)
    assert figures["num_tokens"] > num_calls, "answers of several tokens"
    assert figures["mismatch/mean_abs"] < 1e-4
    assert figures["updated"] == 1
