"""`kill -9` of the PostgreSQL server while everything writes: what was acknowledged is there afterwards.

Ledger, record store and recorder are never opened again: they recover by themselves.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from insitu.backend.ledger import Ledger
from insitu.errors import Unavailable
from insitu.gateway.recording.recorder import Recorder
from insitu.records.store import RecordStore
from insitu.types import LoraSettings, ModelCall, Trajectory, TrajectoryGroup
from tests.support.postgres import OFF, Cluster

_BEFORE, _AFTER = 40, 20
"""Writes acknowledged before the kill, and after the restart."""


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    """A server that syncs to the disk, and that these tests may kill."""
    if os.environ.get(OFF):
        pytest.skip(f"{OFF} is set")
    cluster = Cluster(durable=True)
    try:
        yield cluster
    finally:
        cluster.stop()


def call(number: int) -> ModelCall:
    return ModelCall(f"c{number}", "ro", "m", None, 0, "base", [1], [number], [-1.0], "stop")


class Writing:
    """Writes numbers until it is stopped; remembers what was acknowledged and what was refused."""

    def __init__(self, write: Callable[[int], object]) -> None:
        self.acknowledged: list[int] = []
        self.refused: list[Exception] = []
        self.wrong: list[BaseException] = []
        self._write = write
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            try:
                self._write(number)
                self.acknowledged.append(number)
                number += 1
            except Unavailable as error:  # repeated under the same number, as clients do
                self.refused.append(error)
                time.sleep(0.05)
            except BaseException as error:  # noqa: BLE001 - the test shows it
                self.wrong.append(error)
                return

    def wait_for(self, num_more: int) -> None:
        deadline, wanted = time.monotonic() + 60, len(self.acknowledged) + num_more
        while len(self.acknowledged) < wanted:
            assert not self.wrong, self.wrong
            assert time.monotonic() < deadline, f"{len(self.acknowledged)} of {wanted}: {self.refused[-1:]}"
            time.sleep(0.02)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self.wrong, self.wrong


def test_no_acknowledged_group_is_lost_and_the_ledger_recovers(server: Cluster) -> None:
    with server.database() as url, Ledger(url) as ledger:
        ledger.register_run("p", "run", "m", LoraSettings(), {}, {})

        def put(number: int) -> None:
            group = TrajectoryGroup(f"g{number}", "run", [Trajectory(f"r{number}", ["c"], 1.0)])
            ledger.put_group(group, "h")

        writing = Writing(put)
        try:
            writing.wait_for(_BEFORE)
            server.kill()
            with pytest.raises(Unavailable, match="the ledger cannot be read"):
                ledger.ping()
            server.start()
            writing.wait_for(_AFTER)
        finally:
            writing.stop()
        assert writing.refused, "the server was gone, and nobody heard of it"
        found = [ledger.group_record("run", f"g{number}").group.id for number in writing.acknowledged]
        assert len(found) == len(writing.acknowledged) >= _BEFORE + _AFTER


def test_the_recorder_waits_for_the_server_and_loses_no_call(server: Cluster) -> None:
    with server.database() as url:
        store = RecordStore(url)
        recorder = Recorder(store, max_backlog=10_000)
        written = [recorder.submit(call(number)) for number in range(_BEFORE)]
        assert written[-1] is not None
        written[-1].result(60)
        server.kill()
        for number in range(_BEFORE, _BEFORE + _AFTER):
            recorder.submit(call(number))
        deadline = time.monotonic() + 60
        while recorder.refusal() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert recorder.refusal() == (
            "calls cannot be recorded: OperationalError: the PostgreSQL server does not answer"
        )
        server.start()
        recorder.flush(60)
        assert recorder.refusal() is None
        assert [found.output_ids for found in store.by_rollout("ro")] == [
            [n] for n in range(_BEFORE + _AFTER)
        ]
        assert recorder.num_lost == 0
        recorder.close(10)
        store.close()
