"""No job and no state of the disk ends the supervisor's loops."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from insitu.access.key_file import KEYS_FILE
from insitu.backend import children, serve, state_disk
from insitu.backend.api.settings import ApiSettings
from insitu.backend.http.process import parse as api_arguments
from insitu.backend.ledger import Lease
from insitu.backend.plan.compute import Asked, choose
from insitu.backend.plan.cpu import read_cpu
from insitu.backend.plan.settings import ServeSettings
from insitu.backend.serve import Supervisor
from insitu.backend.serving.version_leases import VersionLeases
from insitu.backend.state_disk import ENOUGH_FREE_BYTES, LEAST_FREE_BYTES, StateDisk, make_private
from insitu.errors import Unavailable
from insitu.gateway.process import settings_from as gateway_settings

Usage = namedtuple("Usage", "free")
Queued = namedtuple("Queued", "id run")


class StandinLedger:
    """Has one ready run with one job; its first answers can be errors."""

    def __init__(self, errors: list[Exception]) -> None:
        self.errors = errors
        self.queued = [Queued("job-1", "run")]
        self.requeued = 0

    def ready_runs(self) -> list[str]:
        if self.errors:
            raise self.errors.pop(0)
        return ["run"]

    def next_jobs(self, ready: list[str]) -> list[Queued]:
        assert ready == ["run"]
        return self.queued[:1]

    def open_leases(self) -> list[Lease]:
        return []

    def requeue_running(self) -> list[str]:
        self.requeued += 1
        return []


class StandinRegistrar:
    host = object()

    async def admit_runs(self) -> None:
        """Nothing is registered."""

    async def reconcile(self) -> None:
        """The ledger is where it was."""


class StandinRunner:
    def __init__(self, ledger: StandinLedger, errors: list[Exception]) -> None:
        self.ledger = ledger
        self.errors = errors
        self.done: list[str] = []

    async def run(self, job: Queued, host: object) -> None:
        assert host is StandinRegistrar.host
        if self.errors:
            raise self.errors.pop(0)
        self.done.append(job.id)
        self.ledger.queued.remove(job)


def supervisor(state: Path, said: list[str]) -> Any:
    compute = choose(read_cpu(), "cpu", Asked(dtype="float32"))
    settings = ServeSettings(state, "cpu", compute, "merged", "shared", "default")
    return Supervisor(settings, state, said.append)


async def works_until(supervisor: Any, runner: StandinRunner, is_there: Any) -> None:
    ledger: Any = runner.ledger
    leases = VersionLeases(supervisor._settings, ledger, traffic=None)  # type: ignore[arg-type] - nothing is lent
    working = asyncio.create_task(supervisor._work(StandinRegistrar(), runner, leases, ledger))
    async with asyncio.timeout(30):
        while not is_there():
            assert not working.done(), working.exception()
            await asyncio.sleep(0.005)
    working.cancel()
    await asyncio.wait([working])


@pytest.mark.parametrize("where", ["ledger", "job"])
@pytest.mark.parametrize(
    "error", [Unavailable("the ledger cannot write: full"), OSError(28, "No space left")]
)
async def test_work_goes_on_when_the_disk_does(
    where: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_STORAGE_AGAIN_SECONDS", 0.01)
    said: list[str] = []
    ledger = StandinLedger([error, error] if where == "ledger" else [])
    runner = StandinRunner(ledger, [error, error] if where == "job" else [])
    await works_until(supervisor(tmp_path, said), runner, lambda: runner.done)
    assert runner.done == ["job-1"]
    assert ledger.requeued >= 1, "a job that could not be recorded runs again"
    waits, goes_on = said
    assert waits.startswith("training waits, calls are answered: ")
    assert error.args[-1] in waits
    assert goes_on == "training goes on"


async def test_a_short_disk_pauses_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [LEAST_FREE_BYTES - 1]
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(free[0]))
    said: list[str] = []
    runner = StandinRunner(StandinLedger([]), [])
    paused = supervisor(tmp_path, said)
    await works_until(paused, runner, lambda: said)
    assert not runner.done
    assert "255 MiB free" in said[0]
    free[0] = LEAST_FREE_BYTES + 2**20
    assert paused._disk.shortage() is not None, "once short, it takes more than the limit"
    assert "255 MiB free" in paused._disk.shortage(), "what is said does not change with every byte"
    free[0] = ENOUGH_FREE_BYTES
    await works_until(paused, runner, lambda: runner.done)


def test_room_is_judged_again_after_a_shortage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [LEAST_FREE_BYTES]
    monkeypatch.setattr(state_disk.shutil, "disk_usage", lambda _path: Usage(free[0]))
    disk = StateDisk(tmp_path)
    assert disk.shortage() is None


def test_a_status_that_cannot_be_written_is_late(tmp_path: Path) -> None:
    watched = supervisor(tmp_path, [])
    registrar = type("StandinRegistrar", (), {"host": None})
    (tmp_path / "status.new").mkdir()  # whatever is in the way: the write fails
    watched._write_status(registrar, None)
    assert not (tmp_path / "status.json").exists()
    (tmp_path / "status.new").rmdir()
    watched._write_status(registrar, None)
    assert (tmp_path / "status.json").exists()


def test_an_existing_state_directory_becomes_private(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    for name in ("ledger.db", "calls.db", "calls.db-wal", "keys.json"):
        (state / name).touch(mode=0o644)
    make_private(state)
    assert {path.stat().st_mode & 0o777 for path in state.iterdir()} == {0o600}
    assert state.stat().st_mode & 0o777 == 0o700


def test_what_a_backend_writes_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_write(directory: Path) -> None:
        directory.mkdir()
        (directory / "file").touch()
        raise Unavailable("enough was seen")

    monkeypatch.setattr(serve, "make_directories", first_write)
    state = tmp_path / "state"
    before = os.umask(0o022)
    try:
        with pytest.raises(Unavailable, match="enough"):
            serve.serve(supervisor(state, [])._settings, print)
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o077 for path in (state, state / "file")] == [0, 0]


def test_the_gateway_and_the_api_read_the_same_keys(tmp_path: Path) -> None:
    serving = supervisor(tmp_path, [])
    gateway = gateway_settings(serving._gateways[0].arguments)
    api = api_arguments(serving._api.arguments)
    assert gateway.keys_file == tmp_path / KEYS_FILE == ApiSettings(api.state_dir, b"").keys_file


async def test_a_taken_port_is_said_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_FREE_SECONDS", 0.5)
    monkeypatch.setattr(serve, "start_ray", lambda *_: pytest.fail("Ray was started"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        waiting = children.wait_ports_free("127.0.0.1", [("--gateway-port", port)])
        with pytest.raises(
            Unavailable, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"
        ) as said:
            await waiting
        assert "--gateway-port" in (said.value.hint or "")
        made = supervisor(tmp_path, [])
        made._settings = replace(made._settings, gateway_port=port)
        with pytest.raises(Unavailable, match=f"127.0.0.1:{port}"):
            await asyncio.wait_for(made.run(), 30)


async def test_a_port_that_becomes_free_is_waited_for() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        asyncio.get_running_loop().call_later(0.5, other.close)
        await asyncio.wait_for(children.wait_ports_free("127.0.0.1", [("--port", other.getsockname()[1])]), 5)
