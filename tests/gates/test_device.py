"""Engines and trainer in turn on pretended devices of 24 and 80 GB: never too much, never half a step."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web

from insitu.backend import serve
from insitu.backend.jobs import StepRunner
from insitu.backend.ledger import Job, Ledger, ledger_url
from insitu.backend.plan.compute import Asked, Placement, choose
from insitu.backend.plan.cpu import read_cpu
from insitu.backend.plan.engine import EngineSettings, Publication
from insitu.backend.plan.settings import Deadlines, ServeSettings
from insitu.backend.serve import Supervisor
from insitu.backend.serving import host as host_module
from insitu.backend.serving import registration as registration_module
from insitu.backend.serving.host import ModelHost
from insitu.backend.serving.registration import Registrar
from insitu.backend.serving.traffic import Traffic
from insitu.backend.serving.version_leases import VersionLeases
from insitu.gateway.app import build_app
from insitu.gateway.shared.settings import Limits, Settings
from insitu.records.store import RecordStore
from insitu.training.batching import score_batch
from insitu.training.model.loading import load_policy
from insitu.types import JobState, ModelCall, RunState, StepSettings, Trajectory, TrajectoryGroup
from tests.gates.gate import gate
from tests.support.pretended_device import (
    LARGE,
    LORA,
    SMALL,
    Faults,
    PretendedDevice,
    Sizes,
    StandinReplicaSet,
    StandinScores,
    StandinTrainerGroup,
)
from tests.support.small_world import build_model

pytestmark = pytest.mark.timeout(300)

HOLD_SECONDS = 4.0
CALL_SECONDS = 2 * HOLD_SECONDS
"""A call waits at most for a hold and, once released, for a replica."""
STEP = StepSettings(learning_rate=1e-2)
VOCABULARY = 97
IDS = [(13 * place) % VOCABULARY for place in range(24)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_model(folder, VOCABULARY, 0)
    return folder


@pytest.fixture(scope="module")
def scores(model: Path) -> StandinScores:
    return StandinScores(model)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory in memory if the system has one: ledgers on disk wait for it at every write."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


class World:
    """A backend without processes: all its parts in this one, on a pretended device."""

    def __init__(
        self, device: PretendedDevice, ledger: Ledger, records: RecordStore, traffic: Traffic
    ) -> None:
        self.device = device
        self.ledger = ledger
        self.records = records
        self.traffic = traffic
        self.registrar: Registrar
        self.runner: StepRunner
        self.leases: VersionLeases
        self.supervisor: Supervisor
        self.state: Path
        self.called = "run"
        self.slowest_call = 0.0
        self.answers: list[int] = []

    @property
    def host(self) -> ModelHost:
        assert self.registrar.host is not None
        return self.registrar.host

    @property
    def engine(self) -> Any:
        (replica,) = self.host.replicas.replicas.values()
        return replica.actor.server  # type: ignore[attr-defined]

    async def register(self, run: str, **engine_args: Any) -> None:
        self.ledger.register_run("gate", run, "tiny", LORA, engine_args, {})
        await self.registrar.admit_runs()
        found = self.ledger.get_run(run)
        assert found.state is RunState.READY, found.error

    async def submit(self, run: str, step: int, attempt: int = 0) -> JobState:
        """Train the step's groups, which are the same in every world."""
        job = self.queue(run, step, attempt)
        await self.runner.run(job, self.host)
        return self.ledger.get_job(job.id).state

    def queue(self, run: str, step: int, attempt: int = 0) -> Job:
        """Queue a step for the supervisor's work loop."""
        ids: list[str] = []
        for number in range(2):
            group = self._group(run, step, number)
            self.ledger.put_group(group, "hash")
            ids.append(group.id)
        return self.ledger.create_job(run, f"{run}-{step}-{attempt}", ids, STEP, "hash")

    def _group(self, run: str, step: int, number: int) -> TrajectoryGroup:
        calls: list[ModelCall] = []
        for rollout in range(4):
            name = f"{run}-{step}-{number}-{rollout}"
            seed = 31 * step + 17 * number + 7 * rollout
            ids = [(seed + 13 * place) % VOCABULARY for place in range(24)]
            version = f"{run}@{step}"
            calls.append(
                ModelCall(name, name, run, run, step, version, ids[:12], ids[12:], [-4.5] * 12, "stop")
            )
        self.records.append(calls)
        trajectories = [Trajectory(call.id, [call.id], float(i)) for i, call in enumerate(calls)]
        return TrajectoryGroup(f"{run}-{step}-{number}", run, trajectories)

    def learned(self, run: str, step: int) -> list[bytes]:
        """The files of the checkpoint with the adapter and the optimizer's moments."""
        path = self.state / "runs" / run / "checkpoints" / f"{step:06d}"
        return [
            (path / name).read_bytes()
            for name in ("adapter/adapter_model.safetensors", "optimizer.safetensors")
        ]

    async def settled(self) -> None:
        """All engines answer, nothing is held, and a new call gets through."""
        deadline = time.monotonic() + 5
        while not all(replica.joined for replica in self.host.replicas.replicas.values()):
            assert time.monotonic() < deadline, "an engine did not come back"
            await asyncio.sleep(0.01)
        assert self.traffic.holds == []
        await self.traffic.refresh()
        assert await self.call() == 200

    async def call(self, model: str | None = None) -> int:
        """One call through the gateway; no call may take longer than its deadline."""
        started = time.monotonic()
        messages = [{"role": "user", "content": "hello"}]
        body = {"model": model or self.called, "messages": messages, "max_tokens": 4}
        headers = {"authorization": "Bearer default"}
        url = f"{self.traffic.gateway_urls[0]}/v1/chat/completions"
        async with self.traffic.http.post(url, json=body, headers=headers) as answer:
            await answer.read()
        self.slowest_call = max(self.slowest_call, time.monotonic() - started)
        self.answers.append(answer.status)
        return answer.status


@asynccontextmanager
async def running(
    state: Path,
    sizes: Sizes,
    model: Path,
    scores: StandinScores,
    publication: Publication = "adapter",
    *,
    four_bit: bool = False,
    placement: Placement = "shared",
) -> AsyncIterator[World]:
    """Start a world with a run that is ready, calls that never cease, and a supervisor that revives."""
    device = PretendedDevice(sizes)
    settings = ServeSettings(
        state,
        "cuda",
        choose(read_cpu(), "cuda", Asked(dtype="float32")),
        publication,
        placement,
        "default",
        model=str(model),
        model_name="tiny",
        four_bit_base=four_bit,
        deadlines=Deadlines(hold=HOLD_SECONDS, drain=HOLD_SECONDS, gateway_push=2.0),
    )
    state.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(host_module, "ReplicaSet", partial(StandinReplicaSet, device, scores))
        patch.setattr(host_module, "TrainerGroup", partial(StandinTrainerGroup, device))
        patch.setattr(host_module, "check_free", placed)
        patch.setattr(registration_module, "check_placement", placed)
        patch.setattr(serve, "_REVIVE_AGAIN_SECONDS", 0.05)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_SECONDS))
        )
        url = await stack.enter_async_context(gateway(f"sqlite:///{state}/calls.db"))
        ledger = stack.enter_context(Ledger(ledger_url(state)))
        records = RecordStore(f"sqlite:///{state}/calls.db")
        stack.callback(records.close)
        traffic = Traffic(http, [url], "admin", settings.deadlines.gateway_push, settings.deadlines.hold)
        world = World(device, ledger, records, traffic)
        world.state = state
        world.registrar = Registrar(settings, ledger, traffic, http, state, lambda _line: None)
        world.runner = StepRunner(settings, ledger, records, traffic)
        world.leases = VersionLeases(settings, ledger, traffic)
        world.supervisor = Supervisor(settings, state, print)
        world.supervisor._state = "ready"
        world.registrar.on_idle = world.runner.forget
        await world.leases.end_all()
        await world.registrar.resume()
        stack.push_async_callback(lambda: world.host.stop())
        await world.register("run")
        stack.push_async_callback(ended, asyncio.create_task(tend(world, world.supervisor)))
        for _ in range(2):
            stack.push_async_callback(ended, asyncio.create_task(calling(world)))
        yield world
        await world.settled()
        assert device.exceeded == []


async def placed(_settings: ServeSettings, _engine: EngineSettings) -> None:
    """Accept every placement: Ray has no GPU here."""


@asynccontextmanager
async def gateway(records_url: str) -> AsyncIterator[str]:
    limits = Limits(
        hold_seconds=HOLD_SECONDS, settle_seconds=0.05, connect_seconds=1.0, probe_interval_seconds=0.1
    )
    app = build_app(Settings(records_url, "default", "admin", limits=limits))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def tend(world: World, supervisor: Supervisor) -> None:
    """What the supervisor does about dead replicas, at a quicker pace."""
    async with asyncio.TaskGroup() as tasks:
        while True:
            heard = await world.traffic.answering()
            await supervisor._hear(world.registrar, heard, tasks)
            if world.registrar.host is not None:
                await supervisor._tend_replicas(world.registrar.host, world.traffic, tasks)
            await asyncio.sleep(0.05)


async def calling(world: World) -> None:
    while True:
        await world.call()
        await asyncio.sleep(0.05)


async def ended(task: asyncio.Task[None]) -> None:
    """End a background task; it must not have ended by itself."""
    assert not task.done(), task.exception()
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["24", "80"])
async def test_device_is_never_exceeded(
    sizes: Sizes, in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with running(in_memory / "state", sizes, model, scores) as world:
        for step in range(3):
            assert await world.submit("run", step) is JobState.SUCCEEDED
        await world.engine.stop()  # killed while it serves
        await world.settled()
        assert await world.submit("run", 3) is JobState.SUCCEEDED
        await world.host.trainer.stop()  # killed while it rests
        assert await world.submit("run", 4) is JobState.SUCCEEDED
        await world.register("second")
        assert await world.submit("second", 0) is JobState.SUCCEEDED
        pid, world.called = world.engine.pid, "tiny"
        for run in ("run", "second"):
            world.ledger.transition_run(run, RunState.CLOSED)
        await world.register("third", max_num_seqs=32)  # restarts engine and trainer
        assert world.engine.pid != pid
        assert await world.submit("third", 0) is JobState.SUCCEEDED
    gate(f"device-{sizes.total:.0f}", world.device.peak, sizes.total, "GiB")


async def test_a_hung_engine_is_replaced_and_no_call_is_lost(
    in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with running(in_memory / "state", SMALL, model, scores) as world:
        assert await world.submit("run", 0) is JobState.SUCCEEDED
        settings = world.supervisor._settings
        world.supervisor._settings = replace(settings, deadlines=Deadlines(engine_silent=0.4))
        watching = asyncio.create_task(world.supervisor._watch(world.registrar, world.traffic))
        hung, num_answers, began = world.engine, len(world.answers), time.monotonic()
        hung.answering.clear()
        while not world.host.replicas.joined() or world.engine is hung:
            assert time.monotonic() < began + 10, "the hung engine was not replaced"
            await asyncio.sleep(0.02)
        seconds = time.monotonic() - began
        await world.settled()
        assert list(world.engine._paths) == list(hung._paths), "the published weights are loaded again"
        assert set(world.answers[num_answers:]) == {200}, "calls on the hung engine fail over"
        assert await world.submit("run", 1) is JobState.SUCCEEDED
        await ended(watching)
    gate("hung-engine", seconds, 5.0, "s until it is replaced, found after 0.4 s")


async def broken(world: World, faults: Faults) -> list[str]:
    """A step, a step with faults, done again if it failed, and a step; return the points of the second."""
    assert await world.submit("run", 0) is JobState.SUCCEEDED
    with world.device.watched(faults) as points:
        state = await world.submit("run", 1)
        passed = list(points)
        await world.settled()
    if state is not JobState.SUCCEEDED:
        assert world.ledger.get_run("run").step == 1
        assert await world.submit("run", 1, attempt=1) is JobState.SUCCEEDED
    assert await world.submit("run", 2) is JobState.SUCCEEDED
    return passed


def of_publication(publication: Publication, points: list[str]) -> list[str]:
    """The points where a publication differs: merged weights have the rest in common with adapters."""
    own = ("engine.reload", "engine.reset_cache", "engine.version", "engine.wake", "trainer.export")
    return [point for point in points if publication == "adapter" or point.startswith(own)]


def scenarios(publication: Publication, points: list[str]) -> list[Faults]:
    """Out of memory at every point of a step, and some faults that come together."""
    points = of_publication(publication, points)
    faults: list[Faults] = [{point: "out of memory"} for point in points]
    faults.append({"engine.wake_up.kv_cache#0": "refused"})
    if publication == "merged":
        return faults
    dying = ("engine.sleep#0", "engine.wake_up.weights#0", "engine.load:done#0", "engine.score#0")
    dying += ("trainer.on_device#0", "trainer.micro_batch#1", "trainer.save:done#0", "trainer.off_device#0")
    faults += [{point: "dies"} for point in dying]
    for point in ("engine.sleep#0", "engine.wake_up.weights#0", "engine.load#0", "engine.wake_up.kv_cache#0"):
        again: Faults = {f"engine.start#{number}": "out of memory" for number in range(3)}
        faults.append({point: "out of memory", **again})
    faults.append({"trainer.on_device#0": "out of memory", "trainer.start#0": "out of memory"})
    return faults


@pytest.mark.parametrize("publication", ["adapter", "merged"])
async def test_fault_at_any_point_leaves_no_half_step(
    publication: Publication, in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with running(in_memory / "unbroken", SMALL, model, scores, publication) as world:
        points = await broken(world, {})
        wanted = [world.learned("run", step) for step in (1, 2, 3)]
    slowest, half_done = 0.0, 0
    every = scenarios(publication, points)
    for number, faults in enumerate(every):
        async with running(in_memory / str(number), SMALL, model, scores, publication) as world:
            await broken(world, faults)
            half_done += [world.learned("run", step) for step in (1, 2, 3)] != wanted
        assert set(world.answers) == {200}, f"{faults}: calls were answered with {set(world.answers)}"
        slowest = max(slowest, world.slowest_call)
    assert len(every) >= (10 if publication == "merged" else 30)
    gate(f"half-done-steps-{publication}", half_done, 0, f"of {len(every)} faults")
    gate(f"slowest-call-{publication}", slowest, CALL_SECONDS, f"s over {len(every)} faults")


@pytest.mark.parametrize("publication", ["adapter", "merged"])
async def test_part_that_hangs_at_any_point_is_given_up(
    publication: Publication, in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with running(in_memory / "unbroken", SMALL, model, scores, publication) as world:
        points = of_publication(publication, await broken(world, {}))
        wanted = [world.learned("run", step) for step in (1, 2, 3)]
    # The trainer is killed whether it hangs before or after the deed.
    points = [point for point in points if point.startswith("engine") or ":done" not in point]
    slowest, longest, half_done = 0.0, 0.0, 0
    for number, point in enumerate(points):
        async with running(in_memory / str(number), SMALL, model, scores, publication) as world:
            began = time.monotonic()
            await broken(world, {point: "hangs"})
            longest = max(longest, time.monotonic() - began)
            half_done += [world.learned("run", step) for step in (1, 2, 3)] != wanted
        assert set(world.answers) == {200}, f"{point}: calls were answered with {set(world.answers)}"
        slowest = max(slowest, world.slowest_call)
    assert len(points) >= (5 if publication == "merged" else 15)
    gate(f"half-done-steps-hanging-{publication}", half_done, 0, f"of {len(points)} parts that hang")
    gate(f"slowest-call-hanging-{publication}", slowest, CALL_SECONDS, f"s over {len(points)}")
    gate(f"three-steps-hanging-{publication}", longest, 15, f"s over {len(points)}")


@torch.no_grad()
def scored(model: Path, *, four_bit: bool = False) -> list[float]:
    logprob_t, _ = load_policy(str(model), torch.device("cpu"), four_bit=four_bit)(score_batch([IDS]))
    return logprob_t.tolist()


async def test_base_in_four_bits_is_served_as_it_is_trained(
    in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with running(in_memory / "state", SMALL, model, scores, "merged", four_bit=True) as world:
        engine = next(iter(world.host.replicas.replicas.values())).engine
        (before,) = await engine.score("tiny", [IDS])
        assert before == pytest.approx(scored(model, four_bit=True), abs=1e-4), "step 0 is the trainer's base"
        assert before != pytest.approx(scored(model), abs=1e-2), "which is not the model's own"
        assert await world.submit("run", 0) is JobState.SUCCEEDED
        (after,) = await engine.score("tiny", [IDS])
        merged = world.state / "runs" / "run" / "merged" / "000001"
        assert after == pytest.approx(scored(merged), abs=1e-4)
        assert after != pytest.approx(before, abs=1e-2), "the step changed what is served"


@pytest.mark.parametrize("poison", ["token", "reward"])
async def test_what_a_batch_brings_ends_its_job_alone(
    poison: str, in_memory: Path, model: Path, scores: StandinScores, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(in_memory / "state", SMALL, model, scores) as world:
        with monkeypatch.context() as patch:
            if poison == "token":
                patch.setitem(globals(), "VOCABULARY", 2**31 - 1)
            else:
                patch.setattr("insitu.backend.jobs.make_batch", overflowing)
            assert await world.submit("run", 0) is JobState.FAILED
        assert not (world.state / "runs" / "run" / "probe.json").exists(), "nothing of it was kept"
        assert await world.submit("run", 1) is JobState.SUCCEEDED


def overflowing(*_: Any) -> Any:
    raise OverflowError("(34, 'Numerical result out of range')")


async def test_engine_comes_back_if_the_new_one_does_not_start(
    in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with running(in_memory / "state", SMALL, model, scores) as world:
        world.called = "tiny"
        world.ledger.transition_run("run", RunState.CLOSED)
        await world.registrar.admit_runs()
        settings = world.host.engine
        with world.device.watched({"engine.start#0": "out of memory"}):
            world.ledger.register_run("gate", "greedy", "tiny", LORA, {"max_num_seqs": 32}, {})
            await world.registrar.admit_runs()
        refused = world.ledger.get_run("greedy")
        assert refused.state is RunState.FAILED
        assert refused.error is not None
        assert world.host.engine == settings
        await world.settled()
