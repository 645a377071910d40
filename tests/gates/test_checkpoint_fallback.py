"""Damaged checkpoints on a pretended device: the run falls back, trains again, and learns the same bytes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from insitu.backend.plan.engine import Publication
from insitu.errors import CorruptCheckpoint
from insitu.types import GroupState, RunState
from tests.gates.test_device import World, ended, in_memory, model, running, scores
from tests.gates.test_version_leases import trained, until
from tests.support.pretended_device import SMALL, StandinScores

pytestmark = pytest.mark.timeout(300)
__all__ = ["in_memory", "model", "scores"]  # fixtures of the same world


@asynccontextmanager
async def working(
    state: Path, model: Path, scores: StandinScores, publication: Publication
) -> AsyncIterator[World]:
    async with running(state, SMALL, model, scores, publication) as world:
        work = asyncio.create_task(
            world.supervisor._work(world.registrar, world.runner, world.leases, world.ledger)
        )
        yield world
        await ended(work)


def digest(world: World, step: int) -> str:
    return hashlib.sha256(b"".join(world.learned("run", step))).hexdigest()


def flip(world: World, step: int, name: str) -> Callable[[], object]:
    """Damage one bit of a file; return what makes it whole again."""
    path = world.state / "runs" / "run" / "checkpoints" / f"{step:06d}" / name
    whole = path.read_bytes()
    body = bytearray(whole)
    body[len(body) // 2] ^= 1
    path.write_bytes(bytes(body))
    return lambda: path.write_bytes(whole)


def check_books(world: World, wanted: dict[int, str], num_steps: int) -> None:
    """Every group is trained once, steps have no gap and the bytes of before, the newest one is served."""
    assert {step: digest(world, step) for step in wanted} == wanted
    assert [step.step for step in world.ledger.steps("run")] == list(range(1, num_steps + 1))
    records = [world.ledger.group_record("run", f"run-{s}-{g}") for s in range(num_steps) for g in (0, 1)]
    assert {record.state for record in records} == {GroupState.CONSUMED}
    assert [record.step for record in records] == [s for s in range(1, num_steps + 1) for _ in (0, 1)]
    run = world.ledger.get_run("run")
    assert (run.state, run.step, run.lost_steps) == (RunState.READY, num_steps, [])
    assert world.traffic.latest["run"] == num_steps


@pytest.mark.parametrize("publication", ["adapter", "merged"])
@pytest.mark.parametrize("restarted", [False, True], ids=["in-work", "at-start"])
async def test_damaged_checkpoints_are_trained_again(
    restarted: bool, publication: Publication, in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with working(in_memory / "state", model, scores, publication) as world:
        for step in range(3):
            await trained(world, world.queue("run", step))
        wanted = {step: digest(world, step) for step in (2, 3)}
        flip(world, 2, "optimizer.safetensors")
        flip(world, 3, "adapter/adapter_model.safetensors")
        if not restarted:  # noticed when the ranks that hold the run are gone
            said: list[str] = []
            world.registrar._say = said.append
            await world.host.trainer.stop()
            waiting = world.queue("run", 3)
            await until(lambda: world.ledger.get_run("run").lost_steps == [2, 3], "the run falls back")
            await trained(world, waiting)
            check_books(world, wanted, 4)
            await until(lambda: len(world.traffic.runs["run"]) <= 2, "older versions are unloaded")
            (line,) = said
            assert line.startswith("run run falls back to step 1, and steps 2 to 3 are trained again: ")
    if restarted:
        async with working(in_memory / "state", model, scores, publication) as world:
            await until(lambda: world.ledger.get_run("run").step == 3, "the lost steps are trained again")
            await until(lambda: world.traffic.latest["run"] == 3, "the last one is served")
            check_books(world, wanted, 3)
            await until(lambda: len(world.traffic.runs["run"]) <= 2, "older versions are unloaded")


async def test_a_revived_engine_loads_no_damaged_adapter(
    in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with working(in_memory / "state", model, scores, "adapter") as world:
        await trained(world, world.queue("run", 0))
        whole = flip(world, 1, "adapter/adapter_model.safetensors")
        world.called = "tiny"
        (replica,) = world.host.replicas.joined()
        await world.engine.stop()
        await until(lambda: not replica.joined, "it is gone")
        with pytest.raises(CorruptCheckpoint, match="adapter_model"):
            await world.host.publisher._restore(replica.engine)
        whole()
        await world.settled()
