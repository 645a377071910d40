"""The contract of workflows."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import psutil

from insitu.config.llms import LLMConfig
from insitu.plugins import ComponentConfig
from insitu.testing.contracts.contract import Contract, assert_json, closes_twice, opened, until
from insitu.testing.standin_gateway import StandinGateway
from insitu.types import Ending
from insitu.workflow.binding import LLMBinding
from insitu.workflow.context import WorkflowContext
from insitu.workflow.execute import execute
from insitu.workflow.kinds.registered import RegisteredConfig
from insitu.workflow.workflow import Workflow

_RUN = "standin-run"
_AT_ONCE = 8


class WorkflowContract(Contract):
    """For a `Workflow`. Its model calls go to a stand-in gateway, which answers with the rollout's id."""

    calls_model: bool = True
    """True if a run calls the trained model (`context.llm()`)."""
    cancellable: bool = True
    """False for an agent that blocks a thread: such a thread cannot be stopped in the middle of a call."""
    stop_seconds: float = 10.0
    """Time for a cancelled run, and everything it started, to end."""

    def value(self) -> Any:
        """Return an input that the workflow can work on."""
        return "question"

    def config(self) -> ComponentConfig:
        """Return the runs' `context.config`."""
        return RegisteredConfig.model_validate({"_type": "standin"})

    def reply(self, rollout_id: str | None, body: Mapping[str, object]) -> str:  # noqa: ARG002 - for who overrides it
        """Return the model's answer. Keep the rollout's id in it if you can: it reveals mixed-up rollouts."""
        return f"answer in {rollout_id}"

    def test_a_run_completes(self) -> None:
        async def test() -> None:
            async with self._opened() as (workflow, gateway):
                assert isinstance(workflow, Workflow), "subclass insitu.workflow.workflow.Workflow"
                outcome = await execute(workflow, self.value(), self._context(gateway, "r0"), 20.0)
                assert outcome.ending is Ending.COMPLETED, f"{outcome.ending}: {outcome.reason}"
                if self.calls_model:
                    where = f"a call must go to the address of context.llm(): {gateway.calls}"
                    assert "r0" in {call.rollout_id for call in gateway.calls}, where

        self.within_deadline(test)

    def test_the_output_is_json(self) -> None:
        async def test() -> None:
            async with self._opened() as (workflow, gateway):
                assert_json(await workflow.run(self.value(), self._context(gateway, "r0")), "the output")

        self.within_deadline(test)

    def test_runs_at_once_do_not_mix(self) -> None:
        async def test() -> None:
            async with self._opened() as (workflow, gateway):
                await workflow.run(self.value(), self._context(gateway, "alone"))
                ids = [f"rollout-{n}-of-{_AT_ONCE}" for n in range(_AT_ONCE)]
                runs = [workflow.run(self.value(), self._context(gateway, each)) for each in ids]
                outputs = await asyncio.gather(*runs)
            counts = Counter(call.rollout_id for call in gateway.calls)
            each = counts["alone"]
            assert counts[None] == 0, f"{counts[None]} model calls belong to no rollout: use context.llm()"
            wrong = {rollout_id: counts[rollout_id] for rollout_id in ids if counts[rollout_id] != each}
            assert not wrong, f"alone a rollout makes {each} model calls, beside others: {wrong}"
            for own, output in zip(ids, outputs, strict=True):
                foreign = [other for other in ids if other != own and other in json.dumps(output)]
                assert not foreign, f"the output of {own} holds an answer of {foreign}: {output!r}"

        self.within_deadline(test)

    def test_a_cancelled_run_leaves_nothing_behind(self) -> None:
        async def test() -> None:
            async with self._opened() as (workflow, gateway):
                children = _children()
                gateway.answering.clear()
                run = asyncio.create_task(workflow.run(self.value(), self._context(gateway, "r0")))
                if self.calls_model:
                    await until(lambda: gateway.num_open > 0 or run.done(), "the run calls its model", 15.0)
                else:
                    await asyncio.sleep(0.2)
                run.cancel()
                await asyncio.wait({run}, timeout=self.stop_seconds)
                assert run.done(), f"a cancelled run must end: it goes on after {self.stop_seconds:g} s"
                if not run.cancelled():
                    run.exception()
                await until(lambda: _children() <= children, "its child processes end", self.stop_seconds)
                if self.cancellable:
                    closed = "its connections to the model are closed"
                    await until(lambda: gateway.num_open == 0, closed, self.stop_seconds)
                gateway.answering.set()

        self.within_deadline(test)

    def test_it_works_on_after_a_cancelled_run(self) -> None:
        async def test() -> None:
            async with self._opened() as (workflow, gateway):
                run = asyncio.create_task(workflow.run(self.value(), self._context(gateway, "r0")))
                await asyncio.sleep(0)
                run.cancel()
                await asyncio.wait({run}, timeout=self.stop_seconds)
                assert run.done(), f"a cancelled run must end: it goes on after {self.stop_seconds:g} s"
                outcome = await execute(workflow, self.value(), self._context(gateway, "r1"), 20.0)
                assert outcome.ending is Ending.COMPLETED, f"{outcome.ending}: {outcome.reason}"

        self.within_deadline(test)

    def test_closing_twice_is_fine(self) -> None:
        async def test() -> None:
            async with self._opened() as (workflow, gateway):
                await closes_twice(workflow)
            async with self._opened() as (workflow, gateway):
                await workflow.run(self.value(), self._context(gateway, "r0"))
                await closes_twice(workflow)

        self.within_deadline(test)

    @asynccontextmanager
    async def _opened(self) -> AsyncGenerator[tuple[Any, StandinGateway]]:
        async with StandinGateway(self.reply, _RUN) as gateway, opened(self.make()) as workflow:
            try:
                yield workflow, gateway
            finally:
                gateway.answering.set()

    def _context(self, gateway: StandinGateway, rollout_id: str) -> WorkflowContext:
        entry = LLMConfig.model_validate({"_type": "openai", "model_name": _RUN, "temperature": 1.0})
        binding = LLMBinding({"policy": entry}, frozenset({"policy"}), _RUN, gateway.url, "standin-key")
        return WorkflowContext(
            rollout_id=rollout_id, example_id="example", config=self.config(), binding=binding
        )


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}
