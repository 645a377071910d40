"""The life of a run on a pretended device: an idle one is nowhere, and who needs it brings it back, once."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from insitu.backend.plan.compute import Placement
from insitu.backend.plan.engine import Publication
from insitu.backend.serving import activity, registration
from insitu.types import JobState, RunState
from insitu.wire.message import encode
from tests.gates.gate import gate
from tests.gates.test_device import LORA, World, in_memory, model, running, scores
from tests.gates.test_version_leases import FIXED, until, working
from tests.support.pretended_device import SMALL, StandinScores

pytestmark = pytest.mark.timeout(300)
__all__ = ["in_memory", "model", "scores"]  # fixtures of the same world


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is done is believed at once, not a second later."""
    monkeypatch.setattr(activity, "_LATE_SECONDS", -0.01)


@asynccontextmanager
async def with_another(
    state: Path,
    model: Path,
    scores: StandinScores,
    publication: Publication = "adapter",
    placement: Placement = "shared",
) -> AsyncIterator[World]:
    """A world with two trained runs; the calls that never cease are to the base model."""
    async with working(state, model, scores, publication, 1, placement) as world:
        world.called = "tiny" if publication == "adapter" else "run"
        yield world
        world.called = "tiny" if publication == "adapter" else next(iter(world.traffic.runs))


def state_of(world: World, run: str) -> RunState:
    return world.ledger.get_run(run).state


async def is_idle(world: World, run: str) -> None:
    world.ledger.note_done(run)
    await until(lambda: state_of(world, run) is RunState.IDLE, f"{run} is idle")
    await until(lambda: run not in world.traffic.runs, "it has left the table")


async def trained(world: World, run: str, step: int) -> None:
    world.ledger.register_run("gate", run, "tiny", LORA, {}, {})
    await until(lambda: state_of(world, run) is RunState.READY, f"{run} is ready")
    job = world.queue(run, step)
    await until(lambda: world.ledger.get_job(job.id).state is JobState.SUCCEEDED, "the step")
    await until(lambda: world.traffic.latest.get(run) == step + 1, "the step is served")


async def answer_of(world: World, run: str) -> tuple[int, dict[str, Any]]:
    body = {"model": run, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    url = f"{world.traffic.gateway_urls[0]}/v1/chat/completions"
    async with world.traffic.http.post(url, json=body, headers={"authorization": "Bearer default"}) as found:
        return found.status, await found.json()


async def scores_of(world: World, run: str) -> list[list[float]]:
    (served,) = [s for step, s in world.traffic.runs[run].items() if step == world.traffic.latest[run]]
    (found,) = (await world.host.score(served, FIXED)).values()
    return found


def num_loads(world: World) -> int:
    return sum(point.startswith("engine.load#") for point in world.device.visited)


@pytest.mark.parametrize("placement", ["shared", "dedicated"])
async def test_the_first_call_brings_an_idle_run_back_and_loads_it_once(
    placement: Placement, in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with with_another(in_memory / "state", model, scores, placement=placement) as world:
        await trained(world, "other", 0)
        before = await scores_of(world, "other")
        await is_idle(world, "other")
        await until(lambda: not any("other@" in name for name in world.engine._paths), "it left the engine")
        assert "other" not in world.host.trainer.opened
        assert "other" not in world.runner._probes
        loads = num_loads(world)
        answers = await asyncio.gather(*[answer_of(world, "other") for _ in range(10)])
        assert [status for status, _ in answers] == [200] * 10
        assert num_loads(world) == loads + 1
        assert state_of(world, "other") is RunState.READY
        assert await scores_of(world, "other") == before, "the same weights as before"
        await is_idle(world, "other")
        await trained(world, "other", 1)  # registering brings it back too
        await is_idle(world, "other")
        job = world.queue("other", 2)
        await until(lambda: world.ledger.get_job(job.id).state is JobState.SUCCEEDED, "a step of an idle run")


async def test_a_run_that_a_call_brought_back_stays_although_the_gateways_are_slow_to_tell(
    in_memory: Path, model: Path, scores: StandinScores, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_another(in_memory / "state", model, scores) as world:
        await trained(world, "other", 0)
        await is_idle(world, "other")
        monkeypatch.setattr(activity.Activity, "heard", lambda *_: None)
        loads = num_loads(world)
        for _ in range(5):
            assert (await answer_of(world, "other"))[0] == 200
            await asyncio.sleep(0.3)
        assert state_of(world, "other") is RunState.READY
        assert num_loads(world) == loads + 1


async def test_a_name_that_no_run_has_is_rejected_at_once(
    in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with with_another(in_memory / "state", model, scores) as world:
        began = time.monotonic()
        status, found = await answer_of(world, "nobody")
        assert (status, found["error"]["message"]) == (404, "Model `nobody` is not served here.")
        assert time.monotonic() - began < 2.0
        world.ledger.register_run("gate", "nobody", "tiny", LORA, {}, {})
        await until(lambda: state_of(world, "nobody") is RunState.READY, "it is registered after all")
        assert (await answer_of(world, "nobody"))[0] == 200


async def test_an_idle_run_comes_back_while_a_step_trains(
    in_memory: Path, model: Path, scores: StandinScores, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_another(in_memory / "state", model, scores, placement="dedicated") as world:
        await trained(world, "other", 0)
        await is_idle(world, "other")
        goes_on = asyncio.Event()
        train_step = world.host.trainer.train_step

        async def slow(*given: Any) -> Any:
            found = await train_step(*given)
            await goes_on.wait()
            return found

        monkeypatch.setattr(world.host.trainer, "train_step", slow)
        job = world.queue("run", 1)
        await until(lambda: world.ledger.get_job(job.id).phase == "train", "the step trains")
        assert (await answer_of(world, "other"))[0] == 200
        assert world.ledger.get_job(job.id).state is JobState.RUNNING
        goes_on.set()
        await until(lambda: world.ledger.get_job(job.id).state is JobState.SUCCEEDED, "the step")
        assert (await answer_of(world, "run"))[0] == 200


async def test_merged_weights_go_from_one_experiment_to_the_next(
    in_memory: Path, model: Path, scores: StandinScores, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_another(in_memory / "state", model, scores, "merged") as world:
        first = await scores_of(world, "run")
        world.ledger.register_run("gate", "next", "tiny", LORA, {}, {})
        await until(lambda: state_of(world, "next") is RunState.IDLE, "the place is taken")
        said = world.ledger.get_run("next").error or ""
        assert "one run at a time, now run, which is active" in said
        assert "insitu runs release run" in said
        status, found = await answer_of(world, "next")
        assert (status, "now run, which is active" in found["error"]["message"]) == (409, True)
        world.ledger.note_done("run")
        world.called = "next"
        await trained(world, "next", 0)
        assert state_of(world, "run") is RunState.IDLE
        status, found = await answer_of(world, "run")
        assert (status, "now next, which is active" in found["error"]["message"]) == (409, True)
        world.called = "run"
        await asyncio.sleep(0.2)  # its last call is over
        world.ledger.note_done("next")
        await until(lambda: world.answers[-1] == 200 and "run" in world.traffic.runs, "run is back")
        assert await scores_of(world, "run") == first
        world.queue("next", 1)  # a step of the other waits, and says for whom
        await until(lambda: "now run" in world.ledger.next_jobs(["next"])[0].phase, "the step waits")
        world.answers.clear()
        world.called = "next"
        await asyncio.sleep(0.2)
        monkeypatch.setattr(registration, "GIVES_WAY_SECONDS", 0.5)  # the harness of `run` was killed
        monkeypatch.setattr(registration, "_AGAIN_SECONDS", 0.1)
        world.registrar._again_at.clear()
        await until(lambda: world.ledger.get_run("next").step == 2, "the silent run gives way")


async def test_a_restart_loads_what_is_active(in_memory: Path, model: Path, scores: StandinScores) -> None:
    async with with_another(in_memory / "state", model, scores) as world:
        await trained(world, "other", 0)
        await is_idle(world, "other")
        world.ledger.note_done("run")
        await until(lambda: state_of(world, "run") is RunState.IDLE, "run is idle")
    async with running(in_memory / "state", SMALL, model, scores) as world:  # registers `run`
        assert list(world.traffic.runs) == ["run"]
        assert num_loads(world) == 1


@pytest.mark.parametrize("number", [30, pytest.param(1000, marks=pytest.mark.sweep)])
@pytest.mark.timeout(900)
async def test_experiments_one_after_the_other_leave_nothing_behind(
    number: int, in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with with_another(in_memory / "state", model, scores) as world:
        seconds: list[float] = []
        kept: list[tuple[int, int]] = []
        for place in range(number):
            run, began = f"experiment-{place}", time.monotonic()
            if place % 10 == 0:
                await trained(world, run, 0)
            else:
                world.ledger.register_run("gate", run, "tiny", LORA, {}, {})
                await until(lambda run=run: state_of(world, run) is RunState.READY, f"{run} is ready")
                seconds.append(time.monotonic() - began)
            await is_idle(world, run)
            if place in (9, number - 1):
                gc.collect()
                kept.append((psutil.Process().memory_info().rss, len(encode(world.traffic._table()))))
        assert set(world.traffic.runs) == {"run"}
        (before, table), (after, last_table) = kept
        assert last_table == table, "the routing table does not grow"
        tenth = len(seconds) // 10
        first, last = (sorted(part)[len(part) // 2] for part in (seconds[: 9 + tenth], seconds[-9 - tenth :]))
        grown = (after - before) / 2**20
        gate(f"experiments-{number}", last / first, 2.0, "x the first's time until it is ready")
        gate(f"experiments-{number}-memory", grown, 64.0, f"MiB more after {number - 10} experiments")
    began = time.monotonic()
    async with running(in_memory / "state", SMALL, model, scores) as world:
        started = time.monotonic() - began
        assert list(world.traffic.runs) == ["run"]
    gate(f"experiments-{number}-start", started, 20.0, "s to start again")
