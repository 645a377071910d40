"""The machines' side of a backend for its page: the supervisor's last report, the ledger and the disk."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field

import orjson
from fastapi.routing import APIRouter

from insitu.access.projects import Project
from insitu.backend.api.health import against, read_report
from insitu.backend.api.requests import new_router
from insitu.backend.api.security import Sender
from insitu.backend.api.settings import Services
from insitu.wire.gateway_state import GatewayState
from insitu.wire.message import Answer, Malformed, read
from insitu.wire.views.backend import FleetView, GatewayView, PhaseView, ProcessView, RankView, ReplicaView


@dataclass(frozen=True, slots=True)
class _Replica(Answer):
    pid: int | None = None
    joined: bool = False
    versions: list[str] = field(default_factory=list[str])
    num_versions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank(Answer):
    rank: int
    device: str
    dtype: str
    pid: int | None = None
    num_threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report(Answer):
    """The part of `status.json` that the page shows; `Supervisor._write_status` writes it."""

    state: str | None = None
    waiting: str | None = None
    pid: int | None = None
    processes: dict[str, int | None] = field(default_factory=dict[str, int | None])
    gateway: GatewayState | None = None
    model: str | None = None
    replicas: dict[str, _Replica] = field(default_factory=dict[str, _Replica])
    trainer: list[_Rank] = field(default_factory=list[_Rank])


def fleet_routes(services: Services) -> APIRouter:
    """Build the router."""
    router = new_router("pages")

    @router.get("/fleet")
    def fleet(sender: Sender) -> FleetView:
        """Processes, engines, trainer, queues and disk, as far as the supervisor has reported them."""
        status, age = read_report(services.settings.state_dir / "status.json")
        causes = [sender.told(cause) for cause in against(status, age)]
        report = _Report()
        if status is not None and age is not None:
            try:
                report = read(_Report, orjson.dumps(status))
            except Malformed as error:
                causes.append(f"the supervisor's report cannot be read: {error}")
        disk = shutil.disk_usage(services.settings.state_dir)
        running = [job for job in services.ledger.running_jobs() if sender.owns(job.run)]
        return FleetView(
            causes=causes,
            state=report.state,
            report_age_seconds=age,
            waiting=None if report.waiting is None else sender.told(report.waiting),
            model=report.model,
            processes=_processes(report),
            replicas=_replicas(report, sender),
            ranks=[RankView(r.rank, r.pid, r.device, r.dtype, r.num_threads) for r in report.trainer],
            gateway=None if report.gateway is None else _gateway(report.gateway, sender),
            phases=[
                PhaseView(
                    *(sender.shown(job.run), job.id, sender.told(job.phase), job.progress, job.attempt),
                    started_at=job.started_at,
                )
                for job in running
            ],
            jobs=services.ledger.count().jobs,
            disk_free_bytes=disk.free,
            disk_size_bytes=disk.total,
        )

    return router


def _processes(report: _Report) -> list[ProcessView]:
    if report.pid is None:
        return []
    named = {"supervisor": report.pid, **report.processes}
    return [ProcessView(name, pid) for name, pid in named.items()]


def _replicas(report: _Report, sender: Project) -> list[ReplicaView]:
    seen = {} if report.gateway is None else report.gateway.replicas
    found: list[ReplicaView] = []
    for name, replica in report.replicas.items():
        state = seen.get(name)
        healthy, in_flight = (None, None) if state is None else (state.healthy, state.in_flight)
        versions = [sender.shown(each) for each in replica.versions if "@" not in each or sender.owns(each)]
        count = max(replica.num_versions, len(replica.versions))
        found.append(ReplicaView(name, replica.pid, replica.joined, healthy, in_flight, versions, count))
    return found


def _gateway(state: GatewayState, sender: Project) -> GatewayView:
    versions = {sender.shown(name): calls for name, calls in state.in_flight.items() if sender.owns(name)}
    return GatewayView(state.held, state.in_flight_total, state.recorded, state.record_backlog, versions)
