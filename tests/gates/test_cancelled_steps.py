"""Jobs cancelled in every phase of a step: the run stays as it was, and the same groups train later."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from insitu.backend.fleet.cluster import ActorDied
from insitu.backend.ledger import Job
from insitu.backend.plan.engine import Publication
from insitu.types import GroupState, JobState, RunState
from tests.gates.gate import gate
from tests.gates.test_device import World, in_memory, model, running, scores
from tests.support.pretended_device import SMALL, StandinScores

pytestmark = pytest.mark.timeout(300)
__all__ = ["in_memory", "model", "scores"]  # fixtures of the same world
PHASES = ("collect", "train", "checkpoint", "publish", "probe")
MOST_SECONDS = 3.0


def cancel_in(world: World, wanted: str) -> list[float]:
    """Cancel the job when this phase has begun; return the list that gets the time of it."""
    at: list[float] = []
    say = world.runner._say

    async def saying(job: Job, phase: str, progress: float, **data: Any) -> None:
        await say(job, phase, progress, **data)
        if phase == wanted:
            at.append(time.monotonic())
            world.ledger.cancel_job(job.id)

    world.runner._say = saying  # type: ignore[method-assign]
    return at


def train_for_ever(world: World) -> None:
    """The ranks compute until they are killed."""
    trainer = world.host.trainer

    async def train(*_: Any) -> dict[str, float]:
        while trainer.running:
            await asyncio.sleep(0.01)
        raise ActorDied("the trainer's train_step failed: a Ray actor died")

    trainer.train_step = train  # type: ignore[method-assign]


@pytest.mark.parametrize("publication", ["adapter", "merged"])
async def test_a_cancelled_step_leaves_the_run_as_it_was(
    publication: Publication, in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with running(in_memory / "plain", SMALL, model, scores, publication) as world:
        for step in range(2):
            assert await world.submit("run", step) is JobState.SUCCEEDED
        wanted = world.learned("run", 2)
    slowest = 0.0
    async with running(in_memory / "cancelled", SMALL, model, scores, publication) as world:
        assert await world.submit("run", 0) is JobState.SUCCEEDED
        say = world.runner._say
        for attempt, phase in enumerate(PHASES):
            table = dict(world.traffic.runs["run"])
            at = cancel_in(world, phase)
            if phase == "train":
                train_for_ever(world)
            assert await world.submit("run", 1, attempt) is JobState.CANCELLED, phase
            slowest = max(slowest, time.monotonic() - at[0])
            world.runner._say = say  # type: ignore[method-assign]
            vars(world.host.trainer).pop("train_step", None)
            run = world.ledger.get_run("run")
            assert (run.state, run.step) == (RunState.READY, 1)
            assert world.traffic.runs["run"] == table, "the old step is served"
            assert world.ledger.group_record("run", "run-1-0").state is GroupState.RECEIVED
            await world.settled()
        assert await world.submit("run", 1, len(PHASES)) is JobState.SUCCEEDED
        assert world.learned("run", 2) == wanted
    gate(f"cancel-{publication}", slowest, MOST_SECONDS, "s from the cancellation to the end")


async def test_a_job_that_waits_for_calls_is_cancelled_at_once(
    in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with running(in_memory / "state", SMALL, model, scores) as world:
        assert await world.submit("run", 0) is JobState.SUCCEEDED
        job = world.queue("run", 1)
        world.engine.answering.clear()
        await asyncio.sleep(0.1)  # the calls under way do not end
        working = asyncio.create_task(world.runner.run(job, world.host))
        while not world.traffic.holds:
            await asyncio.sleep(0.01)
        began = time.monotonic()
        world.ledger.cancel_job(job.id)
        await working
        seconds = time.monotonic() - began
        assert world.ledger.get_job(job.id).state is JobState.CANCELLED
        assert world.traffic.holds == []
        world.engine.answering.set()
    gate("cancel-drain", seconds, 2.0, "s from the cancellation to the end")
