"""The supervisor's report stays small, however many runs are open: a backend that works stays ready."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from insitu.backend.api.health import against, read_report
from insitu.backend.plan.compute import Asked, choose
from insitu.backend.plan.cpu import read_cpu
from insitu.backend.plan.settings import ServeSettings
from insitu.backend.serve import Supervisor
from insitu.wire.gateway_state import GatewayState, ReplicaState

ENGINES, RUNS = 64, 200


@pytest.mark.parametrize(("engines", "runs"), [(ENGINES, RUNS), (8, 10_000), (500, 20)])
def test_hundreds_of_runs_leave_the_backend_ready(tmp_path: Path, engines: int, runs: int) -> None:
    settings = ServeSettings(
        tmp_path, "cpu", choose(read_cpu(), "cpu", Asked(dtype="float32")), "adapter", "dedicated", "default"
    )
    supervisor = Supervisor(settings, tmp_path, print)
    supervisor._state = "ready"
    versions = [
        "base",
        *(f"team-{run % 9}~an-experiment-of-{run}@{step}" for run in range(runs) for step in (1, 2)),
    ]
    replicas = {
        f"replica-{number}": SimpleNamespace(
            id=f"replica-{number}", pid=os.getpid(), joined=True, engine=SimpleNamespace(versions=versions)
        )
        for number in range(engines)
    }
    host: Any = SimpleNamespace(
        engine=SimpleNamespace(served_name="tiny"),
        replicas=SimpleNamespace(replicas=replicas),
        trainer=SimpleNamespace(ranks=[]),
    )
    registrar: Any = SimpleNamespace(host=host)
    gateway = GatewayState(
        epoch=1,
        held=0,
        in_flight={},
        in_flight_total=0,
        recorded=0,
        record_backlog=0,
        put_back={},
        replicas={name: ReplicaState(True, 0) for name in replicas},
        leaving={},
    )
    began = time.process_time()
    supervisor._write_status(registrar, gateway)
    assert time.process_time() - began < 0.02
    file = tmp_path / "status.json"
    assert file.stat().st_size < (64 if engines <= ENGINES else 256) * 2**10
    view, age = read_report(file)
    assert against(view, age) == []
    shown = orjson.loads(file.read_bytes())["replicas"]["replica-0"]
    assert (shown["num_versions"], shown["versions"]) == (len(versions), versions[-4:])
