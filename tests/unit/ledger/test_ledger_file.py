"""The file: durability settings, versions, several processes, group commit."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from insitu.backend.ledger import Ledger, ledger_url, schema
from insitu.database.writer import GroupCommitWriter
from insitu.errors import Conflict, DeadlineExceeded, NotFound, Overloaded, Unavailable
from insitu.types import LoraSettings, Trajectory, TrajectoryGroup


def test_every_connection_is_durable(tmp_path: Path):
    with (
        Ledger(ledger_url(tmp_path)) as ledger,
        ledger._engine.begin() as first,
        ledger._engine.begin() as second,
    ):
        for connection in (first, second):
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
            assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1


@pytest.mark.parametrize(("version", "said"), [(99, "newer"), (0, "older")])
def test_another_schema_version_is_refused(database_url: str, version: int, said: str):
    with (
        Ledger(database_url) as ledger,
        ledger._engine.execution_options(insitu_write=True).begin() as connection,
    ):
        connection.execute(sa.update(schema.meta).values(value=version))
    with pytest.raises(Conflict, match=f"schema version {version}, {said}"):
        Ledger(database_url)


def test_a_directory_that_is_not_there_is_said(tmp_path: Path):
    with pytest.raises(Unavailable, match="unable to open database file"):
        Ledger(ledger_url(tmp_path / "nowhere"))


def test_what_was_written_is_there_after_reopening(database_url: str, make_group):
    with Ledger(database_url) as ledger:
        run = ledger.register_run("p", "run", "m", LoraSettings(), {"a": 1}, {"b": [2]})
        ledger.put_group(make_group("g"), "h")
    with Ledger(database_url) as ledger:
        assert ledger.get_run("run") == run
        assert ledger.group_record("run", "g").group == make_group("g")


def test_processes_that_start_together_share_a_new_ledger(database_url: str):
    program = (
        "import sys; from insitu.backend.ledger import Ledger; from insitu.types import *\n"
        "with Ledger(sys.argv[1]) as ledger:\n"
        "    ledger.register_run('p', 'run', 'm', LoraSettings(), {}, {})\n"
        "    for i in range(20):\n"
        "        name = f'{sys.argv[2]}-{i}'\n"
        "        ledger.put_group(TrajectoryGroup(name, 'run', [Trajectory(name, ['c'], 1.0)]), 'h')\n"
    )
    command = [sys.executable, "-c", program, database_url]
    started = [subprocess.Popen([*command, f"p{n}"], stderr=subprocess.PIPE) for n in range(4)]
    for process in started:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
    with Ledger(database_url) as ledger:
        assert all(ledger.group_record("run", f"p{n}-{i}").group for n in range(4) for i in range(20))


def test_a_refused_operation_does_not_touch_its_neighbours(ledger: Ledger, make_group):
    gate = threading.Event()
    writer = ledger._writer
    blocked = writer.submit(lambda _connection: gate.wait(30))
    # These three wait together, so they share one transaction.
    from insitu.backend.ledger import groups

    def put(name: str, body_hash: str):
        group = make_group(name)
        return writer.submit(lambda c: groups.put(c, group, body_hash, groups.pack(group)))

    good, bad, after = put("a", "h"), put("a", "other"), put("b", "h")
    gate.set()
    assert blocked.result(30)
    assert good.result(30) is True
    with pytest.raises(Conflict):
        bad.result(30)
    assert after.result(30) is True
    assert ledger.group_record("run", "b").group == make_group("b")


def test_nothing_is_acknowledged_when_the_commit_fails(ledger: Ledger, make_group):
    """The disk says no at COMMIT: every operation of the batch hears it, and none is there."""

    def refuse(_connection):
        raise sa.exc.OperationalError("COMMIT", {}, Exception("disk I/O error"))

    gate = threading.Event()
    writer = ledger._writer
    blocked = writer.submit(lambda _connection: gate.wait(30))
    from insitu.backend.ledger import groups

    group = make_group("g")
    waiting = writer.submit(lambda c: groups.put(c, group, "h", groups.pack(group)))
    sa.event.listen(writer._engine, "commit", refuse)
    gate.set()
    try:
        for future in (blocked, waiting):
            with pytest.raises(Unavailable, match="disk I/O error"):
                future.result(30)
    finally:
        sa.event.remove(writer._engine, "commit", refuse)
    with pytest.raises(NotFound):
        ledger.group_record("run", "g")
    assert ledger.put_group(group, "h") is True


def test_the_queue_is_bounded_and_waits_have_deadlines(ledger: Ledger):
    writer = GroupCommitWriter(ledger._engine, max_waiting=1)
    gate, taken = threading.Event(), threading.Event()

    def block(_connection):
        taken.set()
        return gate.wait(30)

    writer.submit(block)
    assert taken.wait(30)
    with pytest.raises(DeadlineExceeded, match="not durable after 0 s"):
        writer.run(lambda _connection: None, deadline_seconds=0.05)
    with pytest.raises(Overloaded):
        writer.submit(lambda _connection: None)
    gate.set()
    writer.close()
    with pytest.raises(Unavailable, match="closed"):
        writer.submit(lambda _connection: None)


def test_close_finishes_what_is_queued(database_url: str, make_group):
    ledger = Ledger(database_url)
    ledger.register_run("p", "run", "m", LoraSettings(), {}, {})
    from insitu.backend.ledger import groups

    futures = []
    for i in range(50):
        group = make_group(f"g{i}")
        futures.append(
            ledger._writer.submit(lambda c, group=group: groups.put(c, group, "h", groups.pack(group)))
        )
    ledger.close()
    assert all(future.result(0) for future in futures)


@pytest.mark.alone
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_group_commit_is_faster_than_one_by_one(ledger: Ledger, capsys):
    def put(n: int) -> bool:
        # A 2-KB row.
        rollout = Trajectory(f"r{n}", [f"call-{n}"], 1.0, metadata={"text": f"{n:08d}" * 250})
        return ledger.put_group(TrajectoryGroup(f"g{n}", "run", [rollout]), "h")

    def rate(num: int, run) -> float:
        begin = time.perf_counter()
        assert all(run())
        return num / (time.perf_counter() - begin)

    single = rate(150, lambda: [put(n) for n in range(150)])
    with ThreadPoolExecutor(32) as pool:
        batched = rate(1500, lambda: list(pool.map(put, range(1000, 2500))))
    with capsys.disabled():
        print(f"\nledger: {batched:.0f} durable groups/s from 32 threads, {single:.0f}/s one by one")
    # The ratio depends on the disk; on none may waiting together cost anything.
    assert batched > 0.8 * single
