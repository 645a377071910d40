"""Runs that start from something on a pretended device: admitted whatever fails, learning as their source."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.backend.ledger.rows import Origin
from insitu.backend.plan.engine import Publication
from insitu.types import JobState, RunState
from tests.gates.gate import gate
from tests.gates.test_device import World, in_memory, model, running, scores
from tests.support.pretended_device import SMALL, Faults, StandinScores

pytestmark = pytest.mark.timeout(300)
__all__ = ["in_memory", "model", "scores"]  # fixtures of the same world


async def forked(world: World, run: str, faults: Faults) -> None:
    """Register a fork of the second step, again if a fault ended it."""
    origin = Origin(None, "run@2")
    world.ledger.register_run("gate", run, "tiny", None, {}, {}, origin)
    with world.device.watched(faults):
        await world.registrar.admit_runs()
    if (found := world.ledger.get_run(run)).state is RunState.FAILED:
        assert faults, found.error
        world.ledger.register_run("gate", run, "tiny", None, {}, {}, origin)
        await world.registrar.admit_runs()
    found = world.ledger.get_run(run)
    assert found.state is RunState.READY, found.error
    world.called = run
    await world.settled()


async def check(world: World, run: str) -> None:
    """The fork begins as its source was, and learns what its source learned next."""
    assert world.learned(run, 0) == world.learned("run", 2)
    assert await world.submit(run, 2) is JobState.SUCCEEDED
    assert world.learned(run, 1) == world.learned("run", 3)


FAULTS: list[Faults] = [
    {"trainer.start_run#0": "out of memory"},
    {"trainer.start_run#0": "dies"},
    {"trainer.save:done#0": "out of memory"},
    {"trainer.save#0": "hangs"},
]


@pytest.mark.parametrize("publication", ["adapter", "merged"])
async def test_a_start_on_shared_devices(
    publication: Publication, in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with running(in_memory / "state", SMALL, model, scores, publication) as world:
        for step in range(3):
            assert await world.submit("run", step) is JobState.SUCCEEDED
        before = "run"
        for number, faults in enumerate([{}, *(FAULTS if publication == "adapter" else FAULTS[:1])]):
            if publication == "merged":  # one run at a time
                world.called = "tiny"
                world.ledger.transition_run(before, RunState.CLOSED)
                await world.registrar.admit_runs()
            before = f"fork-{number}"
            await forked(world, before, faults)
            await check(world, before)
    gate(f"starts-{publication}", world.device.peak, SMALL.total, "GiB")
