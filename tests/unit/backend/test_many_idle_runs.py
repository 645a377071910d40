"""Ten thousand idle runs beside two hundred loaded ones cost a turn and a start next to nothing."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from sqlalchemy import insert

pytest.importorskip("ray", reason="the registrar starts engines, which are Ray actors")

from insitu.backend.api.settings import ApiSettings
from insitu.backend.damage import remove_leftovers
from insitu.backend.http.app import build_api
from insitu.backend.ledger import Ledger, ledger_url, schema
from insitu.backend.plan.compute import Compute
from insitu.backend.plan.settings import ServeSettings
from insitu.backend.serve import Supervisor
from insitu.backend.serving.registration import Registrar
from insitu.backend.serving.version_leases import VersionLeases
from insitu.records.store import RecordStore
from insitu.types import RunState
from insitu.wire.gateway_state import GatewayState
from insitu.wire.routing_table import Served
from tests.unit.backend.test_registrar import QuietTraffic

NUM_IDLE, NUM_LOADED, NUM_ENGINES = 10_000, 200, 64
TURN_SECONDS = 0.02


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Ledger]]:
    folder = tmp_path_factory.mktemp("crowded")
    now = time.time()
    same = {"project": "p", "base_model": "m", "lora": {"rank": 8}, "engine_args": {}, "init_args": {}}
    rows = [
        {"name": f"run-{n}", "step": 3, "created_at": float(n), "updated_at": now, **same, "state": state}
        for n, state in enumerate([RunState.IDLE] * NUM_IDLE + [RunState.READY] * NUM_LOADED)
    ]
    with Ledger(ledger_url(folder)) as ledger:
        signs = [{"run": row["name"], "seen_at": now, "done_at": 0.0} for row in rows]

        def fill(connection: Any) -> None:
            connection.execute(insert(schema.runs), rows)
            connection.execute(insert(schema.activity), signs)

        ledger._writer.run(fill)
        yield folder, ledger


def registrar_of(folder: Path, ledger: Ledger) -> Registrar:
    compute = Compute("float32", (), 1, None, "")
    settings = ServeSettings(folder, "cpu", compute, "adapter", "dedicated", "default", model="m")
    nothing: Any = None
    traffic = QuietTraffic(nothing, ["http://nowhere"], "key", 1.0, 1.0)
    registrar = Registrar(settings, ledger, traffic, nothing, folder, print)
    registrar.host = SimpleNamespace(engine=SimpleNamespace(max_lora_rank=16))  # type: ignore[assignment]
    for number in range(NUM_IDLE, NUM_IDLE + NUM_LOADED):
        traffic.serve_version(f"run-{number}", 3, Served(f"run-{number}@3", f"run-{number}@3"))
    return registrar


@pytest.mark.alone
async def test_a_turn_takes_milliseconds(crowded: tuple[Path, Ledger]) -> None:
    folder, ledger = crowded
    registrar = registrar_of(folder, ledger)
    supervisor = Supervisor(registrar._settings, folder, print)
    supervisor._state = "ready"
    leases = VersionLeases(registrar._settings, ledger, registrar._traffic)
    leases._host = registrar.host
    silent = {f"run-{number}": 1.0 for number in range(NUM_IDLE, NUM_IDLE + NUM_LOADED)}
    heard = GatewayState(
        epoch=1,
        held=0,
        in_flight={f"{run}@3": 2 for run in silent},
        in_flight_total=2 * NUM_LOADED,
        recorded=0,
        record_backlog=0,
        put_back={},
        replicas={},
        leaving={},
        silent=silent,
    )
    turns: list[float] = []
    async with asyncio.TaskGroup() as tasks:
        for _ in range(20):
            began = time.process_time()
            await supervisor._hear(registrar, heard, tasks)
            assert not await supervisor._work_once(registrar, SimpleNamespace(), leases, ledger)  # type: ignore[arg-type]
            supervisor._write_status(_shown(registrar), heard)
            turns.append(time.process_time() - began)
    assert len(registrar._traffic.runs) == NUM_LOADED
    middle, worst = (1e3 * sorted(turns)[place] for place in (10, 19))
    print(f"a turn beside {NUM_IDLE} idle runs: {middle:.1f} ms, at most {worst:.1f}")
    assert sorted(turns)[10] < TURN_SECONDS
    assert (folder / "status.json").stat().st_size < 64 * 2**10
    with closing(RecordStore(f"sqlite:///{folder}/calls.db")) as records:
        app = build_api(ApiSettings.with_key(folder, "default"), ledger=ledger, records=records)
        asgi = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=asgi, base_url="http://127.0.0.1:7623") as client:
            answer = await client.get("/ready")
    assert (answer.status_code, answer.json()) == (200, {"ready": True, "causes": []})


def _shown(registrar: Registrar) -> Any:
    versions = [f"{run}@3" for run in registrar._traffic.runs]
    replicas = {
        f"replica-{number}": SimpleNamespace(
            id=f"replica-{number}", pid=os.getpid(), joined=True, engine=SimpleNamespace(versions=versions)
        )
        for number in range(NUM_ENGINES)
    }
    host = SimpleNamespace(
        engine=SimpleNamespace(served_name="m"),
        replicas=SimpleNamespace(replicas=replicas),
        trainer=SimpleNamespace(ranks=[]),
    )
    return SimpleNamespace(host=host, activity=registrar.activity)


@pytest.mark.alone
def test_a_start_looks_at_what_may_be_left_and_no_more(crowded: tuple[Path, Ledger]) -> None:
    folder, ledger = crowded
    began = time.process_time()
    assert remove_leftovers(ledger, folder / "runs") == []
    seconds = time.process_time() - began
    print(f"the files of {NUM_IDLE + NUM_LOADED} runs: {seconds:.2f} s")
    assert seconds < 1.0
