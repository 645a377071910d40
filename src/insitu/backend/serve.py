"""The supervisor behind `insitu serve`.

    insitu serve (Ray driver)
      ├─ janitor                 cleans up if this process is killed
      ├─ gateway  :8000 …        ◄─ routing table, pushed whole and again after a restart
      ├─ API      :7623          ─► ledger ─┐
      └─ Ray: replicas, trainer ranks       │
                                            ▼
    loops:  tend    every 0.5 s: gateway, API, replicas alive, and as many as wanted? table, status written?
            watch   every 1 s: does every replica answer?
            work    every 0.1 s: runs that come, go or are promoted, version leases, the oldest queued job
            retain  every hour, with --keep-calls: delete old calls

The loops share only the ledger and the model host, and only `work` changes what is served. While the state
directory cannot be written, `work` waits and inference goes on. A failure that neither loop can repair ends
the process and becomes its error message.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import tempfile
import uuid
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import aiohttp

from insitu.access import engine_door
from insitu.access.audit_log import AUDIT_FILE, AuditLog
from insitu.access.key_file import KEYS_FILE
from insitu.backend.announcement import announcement
from insitu.backend.children import Child, wait_answering, wait_ports_free
from insitu.backend.damage import find_damaged_runs, remove_leftovers, set_unreadable_aside
from insitu.backend.fair_share import FairShares
from insitu.backend.fleet.cluster import check_cluster, start_ray, stop_ray
from insitu.backend.fleet.hang_watch import HangWatch, processor_seconds
from insitu.backend.fleet.ray_door import TOKEN_FILE
from insitu.backend.fleet.replicas import Replica
from insitu.backend.jobs import StepRunner
from insitu.backend.ledger import Ledger, ledger_url
from insitu.backend.ledger.adapter_files import remove_unused
from insitu.backend.plan.devices.machine import host_memory, remembered_tokens
from insitu.backend.plan.settings import ServeSettings
from insitu.backend.plan.teachers import key_variable
from insitu.backend.progress.phases import SILENT, Phases, Say
from insitu.backend.retention import Retention
from insitu.backend.serving.host import ModelHost
from insitu.backend.serving.own_certificate import OwnCertificate
from insitu.backend.serving.registration import Registrar
from insitu.backend.serving.scaling import Scaling
from insitu.backend.serving.traffic import Traffic
from insitu.backend.serving.version_leases import VersionLeases
from insitu.backend.state_database import bind
from insitu.backend.state_disk import StateDisk, check_whole, make_private
from insitu.database.url import VARIABLE
from insitu.errors import ChildFailed, InsituError
from insitu.records.store import RecordStore, records_url
from insitu.system.durable import make_directories
from insitu.system.logs import log_to
from insitu.system.processes import MARK, end_marked, lock_directory, remove_tree, start_janitor
from insitu.system.tls import listener_arguments, scheme_of
from insitu.system.torch_builds.mismatched import hide_mismatched
from insitu.wire.gateway_state import GatewayState

_TEND_SECONDS = 0.5
_VERSIONS_SHOWN = 4
"""Of each engine, in the report; with hundreds of runs their names would be megabytes, twice a second."""
_WATCH_SECONDS = 1.0
_WORK_SECONDS = 0.1
_STORAGE_AGAIN_SECONDS = 2.0
_REVIVE_AGAIN_SECONDS = 10.0
"""After a failed revival; calls meanwhile go to the other replicas, or wait in the gateway."""
log = logging.getLogger(__name__)


def serve(settings: ServeSettings, say: Say, phases: Phases = SILENT) -> None:
    """Run a backend until SIGINT or SIGTERM; leave no process, port or temporary directory behind."""
    settings.check()
    os.umask(0o077)
    make_directories(settings.state_dir)
    make_private(settings.state_dir)
    lock = lock_directory(settings.state_dir)
    check_whole(settings.state_dir)
    log_to(settings.logs_dir / "supervisor.log")
    if hidden := hide_mismatched():
        say(f"not used, since torch is built for CPUs and they for CUDA: {', '.join(hidden)}")
    serve_id = uuid.uuid4().hex
    os.environ[MARK] = serve_id
    for secret in ("INSITU_API_KEY", VARIABLE):  # passed explicitly to the children that need them
        os.environ.pop(secret, None)
    for teacher in settings.teachers:
        os.environ.pop(key_variable(teacher.name), None)  # no child asks a teacher
    scratch = Path(tempfile.mkdtemp(prefix="insitu-"))
    janitor = start_janitor(serve_id, scratch)
    try:
        asyncio.run(Supervisor(settings, scratch, say, phases).run())
    finally:
        left = end_marked(serve_id, 5.0, keep=frozenset({janitor.pid}))
        if left:
            log.error("processes %s would not end", left)
        remove_tree(scratch)
        assert janitor.stdin is not None
        janitor.stdin.write(b"done\n")
        janitor.stdin.close()
        janitor.wait(15)
        lock.close()


class Supervisor:
    """Starts everything, keeps it running, and shuts it down."""

    def __init__(self, settings: ServeSettings, scratch: Path, say: Say, phases: Phases = SILENT) -> None:
        self._settings = settings
        self._scratch = scratch
        self._say = say
        self._phases = phases
        self._stopping = asyncio.Event()
        self._state = "starting"
        self._reviving: set[int] = set()
        self._disk = StateDisk(settings.state_dir)
        self._shares = FairShares()
        self._waiting: str | None = None
        """Why no job is taken now."""
        self._status_fails = False
        self._num_damaged = 0
        """Files and runs that this start found damaged."""
        self._retention: Retention | None = None
        admin_key = secrets.token_hex(32)
        logs = settings.logs_dir
        listen = ["--host", settings.host]
        listen += [part for name in settings.allowed_hosts for part in ("--allowed-host", name)]
        listen += listener_arguments(settings.tls, behind_proxy=settings.behind_proxy)
        records = records_url(settings.state_dir, settings.database_url)
        # By environment alone: it may hold a password.
        database = {} if settings.database_url is None else {VARIABLE: settings.database_url}
        keys = {"INSITU_API_KEY": settings.api_key, "INSITU_ADMIN_KEY": admin_key}
        keys[engine_door.VARIABLE] = settings.engine_key
        gateway = [*listen, "--managed", *([] if database else ["--records", records])]
        gateway += ["--keys", str(settings.state_dir / KEYS_FILE)]
        gateway += ["--remembered-tokens", str(remembered_tokens(host_memory(), settings.num_gateways))]
        api = [*listen, "--port", str(settings.port), "--state-dir", str(settings.state_dir)]
        keep = settings.keep_calls_seconds
        api += [] if keep is None else ["--keep-calls-seconds", str(keep)]
        api += ["--publication", settings.publication]
        api += [part for teacher in settings.teachers for part in ("--teacher", teacher.name)]
        self._admin_key = admin_key
        self._trust = None if settings.tls is None else OwnCertificate(settings.tls.certificate)
        self._records_url = records
        self._gateways = [
            Child(
                name := "gateway" if number == 0 else f"gateway-{number}",
                "insitu.gateway",
                [*gateway, "--port", str(port), "--number", str(number)],
                keys | database,
                logs / f"{name}.log",
            )
            for number, port in enumerate(settings.gateway_ports)
        ]
        api_key = {"INSITU_API_KEY": settings.api_key} | database
        self._api = Child("API", "insitu.backend.http", api, api_key, logs / "api.log")

    async def run(self) -> None:
        """Start, work until told to stop, shut down."""
        self._listen_for_signals()
        async with AsyncExitStack() as stack:
            stack.callback(self._take_down)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            state_dir, database_url = self._settings.state_dir, self._settings.database_url
            found = await asyncio.to_thread(set_unreadable_aside, state_dir)
            ledger = stack.enter_context(Ledger(ledger_url(state_dir, database_url)))
            found += await asyncio.to_thread(find_damaged_runs, ledger, self._settings.runs_dir)
            for line in found:
                log.error("%s", line)
                self._say(f"damaged: {line}")
            self._num_damaged = len(found)
            if database_url is not None:
                bind(state_dir, ledger, database_url)
            keep = self._settings.keep_calls_seconds
            records = RecordStore(self._records_url, keep_seconds=keep)
            stack.callback(records.close)
            await self._until_stopped(self._serve(http, ledger, records))

    def _listen_for_signals(self) -> None:
        """Stop in order on Ctrl-C and SIGTERM."""
        loop = asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, self._stopping.set)

    async def _until_stopped(self, work: Awaitable[None]) -> None:
        """Run `work` until a signal arrives or it fails; raise the root cause of its failure."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if working.done():
            raise headline(working.exception())
        self._say("stopping: calls under way are finished, a step under way is repeated at the next start")
        working.cancel()
        await asyncio.wait({working}, timeout=self._settings.deadlines.stop_grace)

    async def _serve(self, http: aiohttp.ClientSession, ledger: Ledger, records: RecordStore) -> None:
        settings, phases = self._settings, self._phases
        gateways = [("--gateway-port", port) for port in settings.gateway_ports]
        await wait_ports_free(settings.host, [("--port", settings.port), *gateways])
        self._say(f"compute  {settings.device}: {settings.compute.line}")
        for path in remove_leftovers(ledger, settings.runs_dir):
            log.warning("removed %s, left by a crash", path)
        for path in remove_unused(settings.state_dir, ledger.awaited_sources(), interrupted=True):
            log.info("removed the uploaded adapter %s, which nothing starts from", path.name)
        for job_id in ledger.requeue_running():
            log.warning("job %s was under way when the last supervisor ended; it runs again", job_id)
        for child in self._children:
            child.start()
        with phases.phase("starting Ray"):
            start_ray(settings.ray_address, self._scratch, settings.state_dir)
            check_cluster(settings)
        self._listen_for_signals()  # Ray has put a handler of its own in its place, which ends the process
        traffic = Traffic(
            http,
            [self._address(port) for port in settings.gateway_ports],
            self._admin_key,
            settings.deadlines.gateway_push,
            settings.deadlines.hold,
            self._trust,
        )
        registrar = Registrar(settings, ledger, traffic, http, self._scratch, self._say, phases)
        runner = StepRunner(settings, ledger, records, traffic, phases, self._shares)
        registrar.on_idle = runner.forget
        leases = VersionLeases(settings, ledger, traffic)
        scaling = Scaling(settings.state_dir, traffic, self._say)
        await leases.end_all()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tend(registrar, traffic, scaling, tasks))
            tasks.create_task(self._watch(registrar, traffic))
            with phases.phase("waiting for the gateway and the API"):
                await wait_answering(http, self._urls(), settings.logs_dir, self._trust)
            await registrar.resume()
            self._state = "ready"
            for line in announcement(settings, registrar.host, phases.seconds):
                self._say(line)
            phases.ready()
            tasks.create_task(self._work(registrar, runner, leases, ledger))
            if settings.keep_calls_seconds is not None:
                audit = AuditLog(settings.state_dir / AUDIT_FILE)
                self._retention = Retention(records, ledger, audit, settings.keep_calls_seconds)
                tasks.create_task(self._retention.run())

    async def _tend(
        self, registrar: Registrar, traffic: Traffic, scaling: Scaling, tasks: asyncio.TaskGroup
    ) -> None:
        while True:
            for child in self._children:
                if child.keep_alive():
                    self._say(f"the {child.name} process had ended and was started again")
            state = await traffic.answering()
            await self._hear(registrar, state, tasks)
            if registrar.host is not None:
                await self._tend_replicas(registrar.host, traffic, tasks)
                scaling.tend(registrar.host, tasks)
            self._write_status(registrar, state)
            await asyncio.sleep(_TEND_SECONDS)

    async def _hear(self, registrar: Registrar, state: GatewayState | None, tasks: asyncio.TaskGroup) -> None:
        """Take from the gateways which runs are called, and which calls wait for runs that are idle."""
        if state is None:
            return
        registrar.activity.heard(state)
        try:
            if self._state == "ready":
                await registrar.call_up(state.wanted, tasks)
        except InsituError as error:  # the ledger is away: the calls wait
            log.warning("calls wait for runs that cannot be looked up: %s", error)

    async def _tend_replicas(self, host: ModelHost, traffic: Traffic, tasks: asyncio.TaskGroup) -> None:
        try:
            dead = await host.replicas.dead()
        except InsituError as error:  # an actor that does not answer in time: ask again
            log.warning("the replicas cannot be asked: %s", error)
            return
        for name in dead:
            replica = host.replicas.replicas.get(name)
            if replica is not None and replica.incarnation not in self._reviving:
                self._reviving.add(replica.incarnation)
                tasks.create_task(self._revive(host, replica, traffic))

    async def _watch(self, registrar: Registrar, traffic: Traffic) -> None:
        """Kill replicas that are alive but do not answer; `tend` finds them dead and revives them."""
        work_of = processor_seconds if self._settings.device == "cpu" else None
        watch = HangWatch(self._settings.deadlines.engine_silent, work_of)
        while True:
            host = registrar.host
            if host is not None and await watch.end_hung(host.replicas, self._say):
                await traffic.offer()
            await asyncio.sleep(_WATCH_SECONDS)

    async def _revive(self, host: ModelHost, replica: Replica, traffic: Traffic) -> None:
        """Bring a dead replica back when the device lease allows; after a failure it is tried again."""
        self._say(f"{replica.id} has died; starting it again with the published weights")
        try:
            replica.joined = False
            await traffic.offer()
            await host.lease.revive(replica)
            await traffic.offer()
            self._say(f"{replica.id} is back")
        except InsituError as error:
            log.exception("%s could not be started again", replica.id)
            self._say(f"{replica.id} could not be started again and will be tried again: {error.message}")
            await asyncio.sleep(_REVIVE_AGAIN_SECONDS)
        finally:
            self._reviving.discard(replica.incarnation)

    async def _work(
        self, registrar: Registrar, runner: StepRunner, leases: VersionLeases, ledger: Ledger
    ) -> None:
        left_running = False
        while True:
            try:
                if left_running:  # what was under way could not be recorded, so it runs again
                    for job_id in await asyncio.to_thread(ledger.requeue_running):
                        log.warning("job %s runs again", job_id)
                    await registrar.reconcile()
                    left_running = False
                worked = await self._work_once(registrar, runner, leases, ledger)
            except (InsituError, OSError) as error:
                if str(error) != self._waiting:
                    log.exception("training waits")
                left_running = True
                self._wait_for(str(error))
                await asyncio.sleep(_STORAGE_AGAIN_SECONDS)
            else:
                if not worked:
                    await asyncio.sleep(_WORK_SECONDS)

    async def _work_once(
        self, registrar: Registrar, runner: StepRunner, leases: VersionLeases, ledger: Ledger
    ) -> bool:
        """Admit runs, serve leases and take the next job; return False if none is there or can be taken."""
        if not leases.exclusive:
            await registrar.admit_runs()
        ready = await asyncio.to_thread(ledger.ready_runs)
        job = self._shares.next(await asyncio.to_thread(ledger.next_jobs, ready) if ready else [])
        await leases.tend(registrar.host, job)
        shortage = await asyncio.to_thread(self._disk.shortage)
        taken = False
        if job is not None and leases.exclusive:
            await leases.say_waiting(job)
        elif job is not None and registrar.host is not None and shortage is None:
            await runner.run(job, registrar.host)
            taken = True
        self._wait_for(shortage)
        return taken

    def _wait_for(self, cause: str | None) -> None:
        """Say once that training waits, and once that it goes on."""
        if cause is not None and cause != self._waiting:
            self._say(f"training waits, calls are answered: {cause}")
        elif cause is None and self._waiting is not None:
            self._say("training goes on")
        self._waiting = cause

    @property
    def _children(self) -> list[Child]:
        return [*self._gateways, self._api]

    def _urls(self) -> dict[str, str]:
        ports = [*self._settings.gateway_ports, self._settings.port]
        children = zip(self._children, ports, strict=True)
        return {child.name: f"{self._address(port)}/health" for child, port in children}

    def _address(self, port: int) -> str:
        """Return the URL by which the supervisor calls a child."""
        return f"{scheme_of(self._settings.tls)}://{_reachable(self._settings.host)}:{port}"

    def _write_status(self, registrar: Registrar, gateway: GatewayState | None) -> None:
        host = registrar.host
        status = {
            "state": self._state,
            "waiting": self._waiting,
            "pid": os.getpid(),
            "processes": {child.name: child.pid for child in self._children},
            "gateway": None if gateway is None else _in_counts(gateway),
            "gateway_port": self._settings.gateway_port,
            "num_gateways": self._settings.num_gateways,
            "deleted_calls": 0 if self._retention is None else self._retention.num_calls,
            "num_damaged": self._num_damaged,
            "model": None if host is None else host.engine.served_name,
            "replicas": {}
            if host is None
            else {
                r.id: {
                    "pid": r.pid,
                    "joined": r.joined,
                    "versions": r.engine.versions[-_VERSIONS_SHOWN:],
                    "num_versions": len(r.engine.versions),
                }
                for r in host.replicas.replicas.values()
            },
            "trainer": [] if host is None else host.trainer.ranks,
        }
        path = self._settings.state_dir / "status.json"
        staged = path.with_suffix(".new")
        try:
            staged.write_text(json.dumps(status, default=str))
            staged.replace(path)
        except OSError as error:  # the disk is full: the report is late, and the next one may succeed
            if not self._status_fails:
                log.warning("status.json cannot be written: %s", error)
            self._status_fails = True
        else:
            self._status_fails = False

    def _take_down(self) -> None:
        """Stop the children and Ray; `serve` later kills marked processes that outlive this."""
        grace = self._settings.deadlines.stop_grace
        for child in self._children:
            if child.process is not None:
                child.process.terminate()
        for child in self._children:
            child.stop(grace)
        stop_ray()
        (self._settings.state_dir / TOKEN_FILE).unlink(missing_ok=True)
        (self._settings.state_dir / "status.json").unlink(missing_ok=True)


def _in_counts(state: GatewayState) -> dict[str, object]:
    """Return the gateways' state without the names of runs, of which there may be many."""
    return asdict(replace(state, in_flight={}, silent={}, wanted=[]))


def _reachable(host: str) -> str:
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"[{address}]" if ":" in address else address


def headline(error: BaseException | None) -> BaseException:
    """Return the first real cause inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error or ChildFailed("the supervisor's loops ended without a reason")
