"""A backend without a GPU or vLLM: real gateway, real API, real ledger, and stand-ins for what learns.

    client ──► API (real) ──► ledger.db (real) ◄── work loop: stands in for supervisor and trainer
    agent  ──► gateway (real) ──► calls.db (real)      │
                    │  ◄──────── routing table (real) ──┘
                    ▼
              StandinEngine

A step trains nothing: it waits `train_seconds`, writes a tiny checkpoint, commits it and serves
`<run>@<step>`. A leased or promoted version is served beside the others. Everything else is what a client of
a true backend meets. In a test it runs in-process (`async with StandinBackend(tmp_path) as backend`), or in
its own process, which may be killed and started again with the same state directory and ports:

    python -m tests.support.standin_backend --state-dir D --port P --gateway-port G
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from aiohttp import web

from insitu.access.key_file import KEYS_FILE
from insitu.backend.api.settings import ApiSettings
from insitu.backend.batch import make_batch
from insitu.backend.damage import find_damaged_runs, remove_leftovers, set_unreadable_aside
from insitu.backend.fair_share import FairShares
from insitu.backend.http.app import build_api
from insitu.backend.ledger import Job, Ledger, Run, ledger_url
from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.backend.serving.traffic import Promoted, Traffic
from insitu.client import InsituClient
from insitu.errors import Cancelled
from insitu.gateway.app import build_app
from insitu.gateway.shared.settings import Settings
from insitu.gateway_client import GatewayClient
from insitu.records.store import RecordStore, records_url
from insitu.system.processes import free_port
from insitu.types import JobState, LeaseState, RunState, policy_name
from insitu.wire.routing_table import Served, ServedBase
from tests.support.standin_engine import Behaviour, StandinEngine

KEY = "default"
_ADMIN_KEY = "standin-admin"
_HOST = "127.0.0.1"
_LOOK_SECONDS = 0.02
_START_SECONDS = 10.0


class _ApiServer(uvicorn.Server):
    """Leaves signals to whoever runs the loop, and ends as soon as it is told to."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.01)


class StandinBackend:
    """One stand-in backend. `fail_next_job` makes the next job fail with that text."""

    def __init__(
        self,
        state_dir: Path,
        behaviour: Behaviour | None = None,
        *,
        port: int = 0,
        gateway_port: int = 0,
        train_seconds: float = 0.05,
        hold_calls: bool = True,
        keep_checkpoints: int = 3,
        engine_url: str | None = None,
    ) -> None:
        """`hold_calls`: calls wait while a step trains, as with a trainer on the engine's devices.

        `engine_url`: a stand-in engine in another process, which must know every model by itself.
        """
        self.state_dir = state_dir
        self.port = port or free_port()
        self.gateway_port = gateway_port or free_port()
        self.train_seconds = train_seconds
        self.hold_calls = hold_calls
        self.keep_checkpoints = keep_checkpoints
        self.engine = StandinEngine(behaviour or Behaviour(), keep_seen=False)
        self._engine_url = engine_url
        self.fail_next_job: str | None = None
        self.num_steps = 0
        """Steps committed since it was started."""
        self.damaged: list[str] = []
        """What its last start found damaged."""
        self.ledger: Ledger
        self._records: RecordStore
        self._traffic: Traffic
        self._shares = FairShares()
        self._stack = AsyncExitStack()

    @property
    def api_url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def gateway_url(self) -> str:
        return f"http://{_HOST}:{self.gateway_port}"

    def client(self) -> InsituClient:
        return InsituClient(self.api_url, KEY)

    def gateway_client(self) -> GatewayClient:
        return GatewayClient(self.gateway_url, KEY)

    async def __aenter__(self) -> StandinBackend:
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._stack.aclose()

    async def _start(self, stack: AsyncExitStack) -> None:
        self.state_dir.mkdir(parents=True, exist_ok=True)
        self.damaged = set_unreadable_aside(self.state_dir)
        self.ledger = stack.enter_context(Ledger(ledger_url(self.state_dir)))
        self.damaged += find_damaged_runs(self.ledger, self._runs_dir)
        remove_leftovers(self.ledger, self._runs_dir)
        self.ledger.requeue_running()
        self.ledger.end_leases("the backend was restarted")
        settings = ApiSettings.with_key(self.state_dir, KEY, _HOST, self.port)
        self._records = RecordStore(records_url(settings.state_dir))
        stack.callback(self._records.close)
        if self._engine_url is None:
            await stack.enter_async_context(self.engine)
        await stack.enter_async_context(self._gateway(records_url(settings.state_dir)))
        await stack.enter_async_context(self._api(settings))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        self._traffic = Traffic(http, [self.gateway_url], _ADMIN_KEY, 10.0, 600.0)
        self._traffic.replicas = lambda: {"replica-0": self._engine_url or self.engine.url}
        base = self.engine.behaviour.models[0]
        self._traffic.base = ServedBase(base, base, "base")
        for run in self.ledger.list_runs():
            if run.state in (RunState.READY, RunState.LOADING):
                self._publish(run, run.step)
        await self._promote(self.ledger.list_runs())
        await self._traffic.push()
        self._write_status()
        await stack.enter_async_context(_running(self._work()))

    @property
    def _runs_dir(self) -> Path:
        return self.state_dir / "runs"

    @asynccontextmanager
    async def _gateway(self, records: str) -> AsyncIterator[None]:
        keys = self.state_dir / KEYS_FILE
        settings = Settings(records, KEY, _ADMIN_KEY, _HOST, self.gateway_port, keys_file=keys)
        runner = web.AppRunner(
            build_app(settings), handler_cancellation=True, access_log=None, shutdown_timeout=1.0
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, _HOST, self.gateway_port, backlog=2048, reuse_address=True).start()
            yield
        finally:
            await runner.cleanup()

    @asynccontextmanager
    async def _api(self, settings: ApiSettings) -> AsyncIterator[None]:
        app = build_api(settings, ledger=self.ledger, records=self._records)
        config = uvicorn.Config(
            app, host=_HOST, port=self.port, log_config=None, access_log=False, lifespan="off", http="h11"
        )
        config.timeout_graceful_shutdown = 1
        server = _ApiServer(config)
        serving = asyncio.create_task(server.serve())
        try:
            async with asyncio.timeout(_START_SECONDS):
                while not server.started:
                    if serving.done():
                        await serving
                        raise AssertionError(f"the API does not listen on {self.api_url}")
                    await asyncio.sleep(0.01)
            yield
        finally:
            app.state.services.stopping = True
            server.should_exit = True
            await serving

    async def _work(self) -> None:
        """What the supervisor does: admit runs, then the oldest queued job, one at a time."""
        while True:
            runs = await asyncio.to_thread(self.ledger.list_runs)
            for name in self._traffic.runs.keys() - {run.name for run in runs}:
                self._traffic.drop_run(name)
                await self._traffic.push()
            for run in runs:
                if run.state in (RunState.REGISTERED, RunState.LOADING):
                    await self._admit(run)
                elif run.state in (RunState.CLOSED, RunState.FAILED) and run.name in self._traffic.runs:
                    self._traffic.drop_run(run.name)
                    await self._traffic.push()
            await self._lend()
            await self._promote(runs)
            ready = [run.name for run in runs if run.state is RunState.READY]
            job = self._shares.next(await asyncio.to_thread(self.ledger.next_jobs, ready) if ready else [])
            if job is not None:
                try:
                    await self._run_job(job)
                except Cancelled:
                    await asyncio.to_thread(self.ledger.transition_job, job.id, JobState.CANCELLED)
            else:
                await asyncio.sleep(_LOOK_SECONDS)

    async def _admit(self, run: Run) -> None:
        await asyncio.to_thread(self.ledger.transition_run, run.name, RunState.LOADING)
        await asyncio.to_thread(self._write_start, run)
        self._publish(run, run.step)
        await self._traffic.push()
        await asyncio.to_thread(self.ledger.transition_run, run.name, RunState.READY)

    def _publish(self, run: Run, step: int) -> None:
        """Serve a version as an adapter of its own name, unless it is the base model."""
        behaviour = self.engine.behaviour
        if run.base_model not in behaviour.models:
            behaviour.models.append(run.base_model)
        version = policy_name(run.name, step)
        is_adapter = step or run.source
        if is_adapter and version not in behaviour.adapters:
            behaviour.adapters.append(version)
        served = Served(version, version) if is_adapter else Served(run.base_model, behaviour.weight_version)
        # Not `serve_version`: full weights under the base's name would take the base model away.
        versions = self._traffic.runs.setdefault(run.name, {})
        versions[step] = served
        for old in [number for number in versions if number < step - 1]:
            del versions[old]
        self._traffic.latest[run.name] = step

    async def _lend(self) -> None:
        """Serve what is leased, and nothing else besides the runs' own versions."""
        behaviour = self.engine.behaviour
        leases = await asyncio.to_thread(self.ledger.open_leases)
        version = behaviour.weight_version
        lent: dict[str, dict[int, Served]] = {}
        for lease in leases:
            run = await asyncio.to_thread(self.ledger.get_run, lease.run)
            is_adapter = lease.step or run.source
            if is_adapter and lease.model not in behaviour.adapters:
                behaviour.adapters.append(lease.model)
            base = Served(run.base_model, version)
            served = Served(lease.model, lease.model) if is_adapter else base
            lent.setdefault(lease.run, {})[lease.step] = served
        if lent != self._traffic.lent:
            self._traffic.lent = lent
            await self._traffic.push()
        for lease in leases:
            if lease.state is LeaseState.WAITING:
                await asyncio.to_thread(self.ledger.make_lease_ready, lease)

    async def _promote(self, runs: list[Run]) -> None:
        """Serve what is promoted under the runs' plain names."""
        promotions = await asyncio.to_thread(self.ledger.current_promotions)
        promoted: dict[str, Promoted] = {}
        for run in runs:
            if run.promoted is not None and run.name in self._traffic.runs:
                version = policy_name(run.name, run.promoted)
                served = Served(version, version)
                if version not in self.engine.behaviour.adapters:
                    self.engine.behaviour.adapters.append(version)
                if run.promoted == 0 and run.source is None:
                    served = Served(run.base_model, self.engine.behaviour.weight_version)
                promoted[run.name] = Promoted(run.promoted, served)
        if promoted != self._traffic.promoted:
            self._traffic.promoted = promoted
            await self._traffic.push()
        for promotion in promotions.values():
            if promotion.reason and promotion.run in self._traffic.runs:
                await asyncio.to_thread(self.ledger.explain_promotion, promotion, "")

    async def _run_job(self, job: Job) -> None:
        job = await asyncio.to_thread(self.ledger.transition_job, job.id, JobState.RUNNING)
        if self.fail_next_job is not None:
            reason, self.fail_next_job = self.fail_next_job, None
            await asyncio.to_thread(self.ledger.fail_job, job.id, reason)
            return
        run = await asyncio.to_thread(self.ledger.get_run, job.run)
        groups = await asyncio.to_thread(self.ledger.groups_of_job, job.id)
        batch = await asyncio.to_thread(make_batch, groups, self._records, job.settings, run.step)
        self._shares.charge(run.name, batch.num_tokens)
        await self._progress(job, "collect", 0.05)
        async with AsyncExitStack() as stack:
            if self.hold_calls:
                await stack.enter_async_context(self._traffic.held(f"run {run.name} trains"))
            for share in (0.1, 0.4, 0.7):
                await self._progress(job, "train", share)
                await asyncio.sleep(self.train_seconds / 3)
            await asyncio.to_thread(self._commit, job, run, batch.metrics)
            self._publish(run, run.step + 1)
        await self._traffic.push()
        self.num_steps += 1

    async def _progress(self, job: Job, phase: str, share: float) -> None:
        await asyncio.to_thread(self.ledger.set_progress, job.id, phase, share, {})

    def _write_start(self, run: Run) -> None:
        """Write step 0 of a run that starts from something; nothing of the source is in it."""
        if run.source is not None and not self.ledger.checkpoints(run.name):
            path, digest = self._checkpoint(run.name, 0)
            self.ledger.commit_start(run.name, str(path), digest)

    def _checkpoint(self, run: str, step: int) -> tuple[Path, str]:
        staging = checkpoints.stage(self._runs_dir, run, step)
        (staging / "adapter").mkdir()
        (staging / "adapter" / "adapter_config.json").write_text(json.dumps({"standin": True}))
        (staging / "state.json").write_text(json.dumps({"step": step}))
        digest = checkpoints.commit(staging)
        run_dir = checkpoints.run_directory(self._runs_dir, run)
        return checkpoints.checkpoint_path(run_dir, step), digest

    def _commit(self, job: Job, run: Run, metrics: dict[str, float]) -> None:
        step = run.step + 1
        path, digest = self._checkpoint(run.name, step)
        run_dir = checkpoints.run_directory(self._runs_dir, run.name)
        figures = {**metrics, "loss/total": 1.0 / step, "time/train_seconds": self.train_seconds}
        self.ledger.commit_step(job.id, step, figures, str(path), digest)
        checkpoints.note_committed(run_dir, step)
        for old in self.ledger.prune_checkpoints(run.name, self.keep_checkpoints):
            checkpoints.remove(run_dir, old)

    def _write_status(self) -> None:
        status = {
            "state": "ready",
            "pid": os.getpid(),
            "gateway_port": self.gateway_port,
            "model": self.engine.behaviour.models[0],
        }
        (self.state_dir / "status.json").write_text(json.dumps(status))


@asynccontextmanager
async def _running(work: Any) -> AsyncIterator[None]:
    """Run a loop beside the block. If it failed, that is the error of the block."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _serve(arguments: argparse.Namespace) -> None:
    behaviour = Behaviour(
        models=[arguments.model], delay_seconds=tuple(arguments.delay), texts=arguments.text
    )
    backend = StandinBackend(
        arguments.state_dir,
        behaviour,
        port=arguments.port,
        gateway_port=arguments.gateway_port,
        train_seconds=arguments.train_seconds,
        engine_url=arguments.engine_url,
    )
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    async with backend:
        print(f"api {backend.api_url} gateway {backend.gateway_url}", flush=True)
        print("ready", flush=True)
        await stop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="a backend without a GPU")
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--gateway-port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--model", default="tiny", help="the base model's name")
    parser.add_argument("--delay", type=float, nargs=2, default=(0.0, 0.0), help="seconds of a generation")
    parser.add_argument("--train-seconds", type=float, default=0.1)
    parser.add_argument("--text", action="append", default=[], help="an answer to choose from; repeatable")
    parser.add_argument("--engine-url", help="a stand-in engine in a process of its own")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
