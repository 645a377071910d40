"""Versions leased for evaluation on a pretended device: the right weights answer, and training goes on as if
nothing had been evaluated, whatever fails on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from insitu.backend.ledger import Job, Lease
from insitu.backend.plan.compute import Placement
from insitu.backend.plan.engine import Publication
from insitu.backend.serving import version_leases
from insitu.errors import Conflict, NotFound
from insitu.types import JobState, LeaseState
from tests.gates.gate import gate
from tests.gates.test_device import World, ended, in_memory, model, running, scores
from tests.support.pretended_device import SMALL, Faults, StandinScores

pytestmark = pytest.mark.timeout(300)
__all__ = ["in_memory", "model", "scores"]  # fixtures of the same world

FIXED = [[5, 6, 7, 8, 9, 10, 11, 12], [3, 1, 4, 1, 5, 9, 2, 6]]
WAIT_SECONDS = 10.0


@pytest.fixture(autouse=True)
def quick_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_leases, "_AGAIN_SECONDS", 0.05)


@asynccontextmanager
async def working(
    state: Path,
    model: Path,
    scores: StandinScores,
    publication: Publication,
    num_steps: int = 2,
    placement: Placement = "shared",
) -> AsyncIterator[World]:
    """A world with trained steps and the supervisor's work loop; merged weights match their version."""
    sizes = SMALL if placement == "shared" else replace(SMALL, total=2 * SMALL.total, share=SMALL.share / 2)
    async with running(state, sizes, model, scores, publication, placement=placement) as world:
        for step in range(world.ledger.get_run("run").step, num_steps):
            assert await world.submit("run", step) is JobState.SUCCEEDED
        work = world.supervisor._work(world.registrar, world.runner, world.leases, world.ledger)
        working = asyncio.create_task(work)
        yield world
        await ended(working)
        assert world.leases.exclusive is False
        check_versions(world, publication)


def check_versions(world: World, publication: Publication) -> None:
    """Every call was answered by the version of its name, and with the weights that the engine named."""
    for call in world.records.of_run("run", 0):
        if call.id.startswith("mc-"):
            version = f"run@{call.policy_step}" if call.policy_step else "base"
            assert call.policy_version.partition("#")[0] == version
            assert call.model in ("run", f"run@{call.policy_step}")
    for version, merged in world.device.answered if publication == "merged" else []:
        step = version.partition("@")[2]
        assert (merged is not None and merged.name == f"{int(step):06d}") if step else True, (version, merged)


async def until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not done():
        assert time.monotonic() < deadline, f"waited for: {what}"
        await asyncio.sleep(0.02)


async def taken(world: World, step: int, lease_id: str = "one", seconds: float = 60.0) -> Lease:
    """Take a lease and wait until it is ready or has ended."""
    world.ledger.take_lease("run", lease_id, step, seconds)
    await until(lambda: state_of(world, lease_id) is not LeaseState.WAITING, f"the lease {lease_id}")
    return world.ledger.get_lease("run", lease_id)


def state_of(world: World, lease_id: str) -> LeaseState:
    return world.ledger.get_lease("run", lease_id).state


async def released(world: World, lease_id: str = "one") -> None:
    world.ledger.release_lease("run", lease_id)
    await until(lambda: not world.leases._lent and not world.traffic.holds, "everything is taken back")


async def trained(world: World, job: Job) -> None:
    await until(lambda: world.ledger.get_job(job.id).state is JobState.SUCCEEDED, "the step")
    step = world.ledger.get_run("run").step
    await until(lambda: world.traffic.latest["run"] == step, "the step is served")


async def engine_scores(world: World, served_step: int) -> list[list[float]]:
    table = world.traffic._table().runs["run"].served
    (found,) = (await world.host.score(table[served_step], FIXED)).values()
    return found


@pytest.mark.parametrize("publication", ["adapter", "merged"])
async def test_leased_versions_answer_and_change_nothing(
    publication: Publication, in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with working(in_memory / "plain", model, scores, publication) as world:
        published = await engine_scores(world, 2)
        await trained(world, world.queue("run", 2))
        wanted = world.learned("run", 3)
        other = await engine_scores(world, 3)
    async with working(in_memory / "leased", model, scores, publication) as world:
        base = scores.of(None, None, FIXED)
        lease = await taken(world, 0)
        assert (lease.state, lease.model) == (LeaseState.READY, "run@0")
        assert await engine_scores(world, 0) == base
        assert await world.call("run@0") == 200
        waiting = world.queue("run", 2)
        if publication == "merged":
            await until(lambda: bool(world.ledger.get_job(waiting.id).phase), "the step says that it waits")
            phase = world.ledger.get_job(waiting.id).phase
            assert phase == "waits for the evaluation of run@0, at most 60 s unless it is renewed"
            held = asyncio.create_task(world.call("run"))
            await asyncio.sleep(0.2)
            assert not held.done()
            world.ledger.release_lease("run", "one")
            assert await held == 200
        await trained(world, waiting)
        await released(world)
        assert world.learned("run", 3) == wanted
        assert await engine_scores(world, 3) == other
        lease = await taken(world, 2, "two")
        assert lease.state is LeaseState.READY
        assert await engine_scores(world, 2) == published
        assert await world.call("run@2") == 200
        await released(world, "two")
        assert await world.call("run") == 200
        assert await engine_scores(world, 3) == other
        if publication == "merged":
            assert await world.call("run@2") == 404
            kept = [path.name for path in (world.state / "runs/run/merged").iterdir()]
            assert kept == ["000003"]


@pytest.mark.parametrize("publication", ["adapter", "merged"])
async def test_engine_killed_during_a_lease(
    publication: Publication, in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with working(in_memory / "state", model, scores, publication, num_steps=3) as world:
        assert (await taken(world, 1)).state is LeaseState.READY
        first = await engine_scores(world, 1)
        await world.engine.stop()
        assert await world.call("run@1") == 200
        assert await engine_scores(world, 1) == first
        await released(world)
        assert await world.call("run") == 200


async def test_leases_are_shared_and_take_turns(in_memory: Path, model: Path, scores: StandinScores) -> None:
    async with working(in_memory / "state", model, scores, "merged") as world:
        assert (await taken(world, 1, "one")).state is LeaseState.READY
        assert (await taken(world, 1, "same")).state is LeaseState.READY
        world.ledger.take_lease("run", "other", 0, 60)
        await until(lambda: "run@1" in world.ledger.get_lease("run", "other").reason, "the reason")
        world.ledger.release_lease("run", "one")
        await asyncio.sleep(0.3)
        assert state_of(world, "other") is LeaseState.WAITING
        assert await world.call("run@1") == 200
        world.ledger.release_lease("run", "same")
        await until(lambda: state_of(world, "other") is LeaseState.READY, "its turn")
        assert await world.call("run@0") == 200
        await released(world, "other")


async def test_older_step_goes_first(in_memory: Path, model: Path, scores: StandinScores) -> None:
    async with working(in_memory / "state", model, scores, "merged") as world:
        assert (await taken(world, 0, "one")).state is LeaseState.READY
        job = world.queue("run", 2)
        world.ledger.take_lease("run", "two", 1, 60)
        world.ledger.release_lease("run", "one")
        await until(lambda: state_of(world, "two") is LeaseState.READY, "its turn")
        assert world.ledger.get_job(job.id).state is JobState.SUCCEEDED
        await released(world, "two")


async def test_lease_that_nobody_renews_ends_by_itself(
    in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with working(in_memory / "state", model, scores, "merged") as world:
        assert (await taken(world, 1, seconds=1.0)).state is LeaseState.READY
        assert await world.call("run") == 200  # held until the lease has ended
        with pytest.raises(Conflict, match="not renewed in time"):
            world.ledger.take_lease("run", "one", 1, 60)
        await until(lambda: not world.traffic.holds, "the published weights are back")


async def test_call_that_never_ends_is_cut_off(in_memory: Path, model: Path, scores: StandinScores) -> None:
    async with working(in_memory / "state", model, scores, "merged") as world:
        assert (await taken(world, 1)).state is LeaseState.READY
        engine = world.engine
        engine.behaviour.gate = asyncio.Event()
        call = asyncio.create_task(world.call("run@1"))
        await until(lambda: engine.num_generating > 0, "the call generates")
        world.ledger.release_lease("run", "one")
        assert await call == 404  # it was tried again, on the published version
        assert world.engine.pid != engine.pid
        await released(world)


async def test_restarted_supervisor_serves_what_is_committed(
    in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with running(in_memory / "state", SMALL, model, scores, "merged") as world:
        for step in range(2):
            assert await world.submit("run", step) is JobState.SUCCEEDED
        published = await engine_scores(world, 2)
        world.ledger.take_lease("run", "one", 1, 3600)
        await world.leases.tend(world.host, None)
        assert state_of(world, "one") is LeaseState.READY
        # What a crash leaves: an open lease in the ledger. The rest of this world ends as if it were whole.
        world.leases._open.clear()
        await world.leases._take_back(world.leases._lent["run", 1], world.host)
    async with working(in_memory / "state", model, scores, "merged") as world:
        with pytest.raises(Conflict, match="the backend was restarted"):
            world.ledger.take_lease("run", "one", 1, 60)
        assert await engine_scores(world, 2) == published
        assert await world.call("run") == 200


async def test_missing_step_and_kept_steps(in_memory: Path, model: Path, scores: StandinScores) -> None:
    async with working(in_memory / "state", model, scores, "adapter") as world:
        with pytest.raises(NotFound, match="step 9 of run 'run' is not kept; kept are 0, 1, 2"):
            world.ledger.take_lease("run", "none", 9, 60)
        assert (await taken(world, 1)).state is LeaseState.READY
        first = await engine_scores(world, 1)
        for step in range(2, 7):
            await trained(world, world.queue("run", step))
        assert 1 in [kept.step for kept in world.ledger.checkpoints("run")]
        await world.engine.stop()  # a fresh engine loads the leased version too
        assert await world.call("run@1") == 200
        assert await engine_scores(world, 1) == first
        await released(world)
        assert await world.call("run@1") == 404
        assert await world.call("run") == 200


async def evaluated(world: World, faults: Faults, lease_id: str = "one") -> list[str]:
    """Lease step 1 and release it, with faults; return the points that were passed."""
    await asyncio.gather(*world.runner._retiring)  # an older version may still be unloaded after its step
    with world.device.watched(faults) as points:
        lease = await taken(world, 1, lease_id)
        if lease.state is LeaseState.READY:
            assert await world.call("run@1") == 200
        else:
            assert "run@1 could not be loaded" in lease.reason
        await released(world, lease_id)
        passed = list(points)
        await world.settled()
    return passed


@pytest.mark.parametrize("publication", ["adapter", "merged"])
async def test_fault_at_any_point_of_a_lease_leads_back(
    publication: Publication, in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with working(in_memory / "unbroken", model, scores, publication, num_steps=3) as world:
        points = await evaluated(world, {})
        published = await engine_scores(world, 3)
        await trained(world, world.queue("run", 3))
        wanted = world.learned("run", 4)
    # Before an operation it is refused, after it has taken effect the process dies.
    every: list[Faults] = [{point: "dies" if ":done" in point else "out of memory"} for point in points]
    lost = 0
    async with working(in_memory / "broken", model, scores, publication, num_steps=3) as world:
        for number, faults in enumerate(every):
            await evaluated(world, faults, f"lease-{number}")
            lost += await engine_scores(world, 3) != published
        await trained(world, world.queue("run", 3))
        lost += world.learned("run", 4) != wanted
    assert len(every) >= (20 if publication == "merged" else 4)
    gate(f"lost-by-a-lease-{publication}", lost, 0, f"of {len(every)} faults")
