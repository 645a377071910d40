"""The fleet: what the supervisor, the ledger and the disk say, and nothing that nobody has said."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from insitu.access.key_changes import create_key
from insitu.access.scopes import Scope
from insitu.backend.ledger import Ledger
from insitu.types import JobState, LoraSettings, StepSettings, Trajectory, TrajectoryGroup
from insitu.wire.message import read
from insitu.wire.views.backend import FleetView, ProcessView, RankView, ReplicaView
from tests.support.pages_backend import STATUS


async def fleet(client: httpx.AsyncClient, **headers: str) -> FleetView:
    got = await client.get("/v1/fleet", headers=headers)
    assert got.status_code == 200, got.text
    return read(FleetView, got.content)


async def test_the_report_of_the_supervisor(http: httpx.AsyncClient, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps(STATUS))
    view = await fleet(http)
    assert (view.causes, view.state, view.model, view.waiting) == ([], "ready", "tiny", None)
    assert view.report_age_seconds is not None
    assert view.report_age_seconds < 30
    named = [("supervisor", 4001), ("gateway", 4002), ("api", 4003)]
    assert view.processes == [ProcessView(name, pid) for name, pid in named]
    assert view.replicas == [
        ReplicaView(
            "replica-0",
            4010,
            True,
            True,
            in_flight=4,
            versions=["base", "adder@2", "adder@3"],
            num_versions=3,
        ),
        ReplicaView(
            "replica-1", 4011, False, False, in_flight=1, versions=["base", "adder@2"], num_versions=2
        ),
    ]
    assert view.ranks == [RankView(rank, 4020 + rank, "cpu", "float32", 2) for rank in (0, 1)]
    assert view.gateway is not None
    assert (view.gateway.held, view.gateway.in_flight, view.gateway.record_backlog) == (2, 5, 3)
    assert view.gateway.versions == {"adder@3": 4, "adder@2": 1}
    assert 0 < view.disk_free_bytes <= view.disk_size_bytes


@pytest.mark.parametrize("content", [None, "{", "[]", json.dumps({"state": "ready", "processes": 3})])
async def test_nothing_is_made_up(content: str | None, http: httpx.AsyncClient, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "status.json").write_text(content)
    view = await fleet(http)
    assert view.causes
    assert (view.state, view.gateway, view.model) == (None, None, None)
    assert not view.processes + view.replicas + view.ranks
    assert view.disk_size_bytes > 0


async def test_a_project_sees_its_own_versions_and_steps(
    stranger: httpx.AsyncClient, tmp_path: Path, ledger: Ledger
) -> None:
    for run in ("a~adder", "b~adder"):
        ledger.register_run("p", run, "model", LoraSettings(), {}, {})
        ledger.put_group(TrajectoryGroup("g", run, [Trajectory(f"{run}-r", ["inline:x"], 1.0)]), "g")
        job = ledger.create_job(run, "k", ["g"], StepSettings(), "h")
        ledger.transition_job(job.id, JobState.RUNNING)
        ledger.set_progress(job.id, "training", 0.5, {})
    gateway = STATUS["gateway"] | {"in_flight": {"a~adder@1": 3, "b~adder@2": 2}}
    waiting = {"waiting": "the checkpoint of a~adder cannot be read"}
    engine = {"pid": 1, "joined": True, "versions": ["base", "a~adder@1", "b~adder@2"]}
    report = STATUS | waiting | {"gateway": gateway, "replicas": {"replica-0": engine}}
    (tmp_path / "status.json").write_text(json.dumps(report))
    key, _ = create_key(tmp_path, "own", [Scope.SUBMIT], project="b")
    headers = {"Authorization": f"Bearer {key}"}
    view = await fleet(stranger, **headers)
    assert view.gateway is not None
    assert view.gateway.versions == {"adder@2": 2}
    assert view.replicas[0].versions == ["base", "adder@2"]
    assert [(each.run, each.phase, each.progress) for each in view.phases] == [("adder", "training", 0.5)]
    assert view.jobs["running"] == 2
    assert "a~" not in (await stranger.get("/v1/fleet", headers=headers)).text
    assert "another project" in str(view.waiting)
