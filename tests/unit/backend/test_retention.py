"""`--keep-calls`: old calls go, those of open groups and queued jobs stay, and every deletion is noted."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy.exc import OperationalError

from insitu.access.audit_log import AUDIT_FILE, AuditLog
from insitu.backend import retention as module
from insitu.backend.http.process import parse
from insitu.backend.ledger import Ledger, ledger_url
from insitu.backend.retention import GRACE_SECONDS, Retention, referred_calls
from insitu.cli import cli
from insitu.errors import Unavailable
from insitu.records.old_calls import OldRollout
from insitu.records.store import RecordStore
from insitu.types import JobState, LoraSettings, ModelCall, StepSettings, Trajectory, TrajectoryGroup

DAY = 86_400.0
KEEP = 30 * DAY


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.0)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(ledger_url(tmp_path)) as opened:
        opened.register_run("project", "run", "model", LoraSettings(), {}, {})
        yield opened


@pytest.fixture
def records(tmp_path: Path) -> Iterator[RecordStore]:
    store = RecordStore(f"sqlite:///{tmp_path}/calls.db", keep_seconds=KEEP)
    yield store
    store.close()


def retention_of(records: RecordStore, ledger: Ledger, folder: Path, now: float = 0.0) -> Retention:
    """At a time, counted from the latest start of a call that goes."""
    audit = AuditLog(folder / AUDIT_FILE)
    return Retention(records, ledger, audit, KEEP, clock=lambda: now + KEEP + GRACE_SECONDS)


def call(rollout_id: str | None, number: int = 0, started_at: float = -1.0) -> ModelCall:
    made = ModelCall(
        f"{rollout_id}-{number}", rollout_id, "run", "run", 0, "base", [1, 2, 3], [4], [-0.5], "stop"
    )
    return replace(made, started_at=started_at)


def put(ledger: Ledger, group: str) -> None:
    """A group of one rollout, which names the first of its two calls."""
    ledger.put_group(TrajectoryGroup(group, "run", [Trajectory(group, [f"{group}-0"], 1.0)]), group)


def train(ledger: Ledger, group: str, step: int) -> str:
    job = ledger.create_job("run", group, [group], StepSettings(), group)
    ledger.transition_job(job.id, JobState.RUNNING)
    ledger.commit_step(job.id, step, {}, f"path-{step}", "sha")
    return job.id


def noted(folder: Path) -> list[dict[str, Any]]:
    path = folder / AUDIT_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_calls_of_open_groups_and_jobs_stay(
    ledger: Ledger, records: RecordStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    names = ["received", "queued", "running", "failed", "cancelled", "trained", "lost", "nobody"]
    records.append([call(name, number) for name in names for number in (0, 1)])
    for name in names[:-1]:
        put(ledger, name)
    train(ledger, "trained", 1)
    train(ledger, "lost", 2)
    ledger.fall_back("run", 1, "its checkpoint is damaged")
    ledger.create_job("run", "queued", ["queued"], StepSettings(), "queued")
    job = ledger.create_job("run", "running", ["running"], StepSettings(), "running")
    ledger.transition_job(job.id, JobState.RUNNING)
    job = ledger.create_job("run", "failed", ["failed"], StepSettings(), "failed")
    ledger.fail_job(job.id, "why not")
    job = ledger.create_job("run", "cancelled", ["cancelled"], StepSettings(), "cancelled")
    ledger.cancel_job(job.id)
    retention = retention_of(records, ledger, tmp_path)
    assert await retention.sweep() is False
    left = {name for name in names if records.by_rollout(name)}
    assert left == set(names) - {"trained", "nobody"}
    assert all(len(records.by_rollout(name)) == 2 for name in left)  # the whole rollout, for its parents
    assert (retention.num_calls, retention.num_rollouts) == (4, 2)
    assert "deleted 4 calls of 2 rollouts, older than 30 d" in caplog.text
    (line,) = noted(tmp_path)
    assert (line["key"], line["from"]) == ("supervisor", "this machine")
    assert line["change"] == "calls delete 4 of 2 rollouts, older than 30 d"
    await retention.sweep()
    assert len(noted(tmp_path)) == 1  # nothing was left to delete


async def test_age_counts_from_the_newest_call(ledger: Ledger, records: RecordStore, tmp_path: Path) -> None:
    records.append([call("a", 0), call("a", 1, 0.5), call("b"), call(None, 1), call(None, 2, 0.5)])
    await retention_of(records, ledger, tmp_path).sweep()
    assert records.exists(["a-0", "a-1", "b-0", "None-1", "None-2"]) == {"a-0", "a-1", "None-2"}
    await retention_of(records, ledger, tmp_path, now=1.0).sweep()
    assert records.count() == 0


async def test_a_group_that_arrives_during_a_sweep_keeps_its_calls(
    ledger: Ledger, records: RecordStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BATCH_CALLS", 1)
    records.append([call("a"), call("b")])
    retention = retention_of(records, ledger, tmp_path)
    delete = retention._delete

    def deleting(*given: Any) -> Any:
        deleted = delete(*given)
        if not ledger.open_rollouts(["b"]):
            put(ledger, "b")
        return deleted

    monkeypatch.setattr(retention, "_delete", deleting)
    await retention.sweep()
    assert records.exists(["a-0", "b-0"]) == {"b-0"}
    assert (retention.num_calls, retention.num_rollouts) == (1, 1)


async def test_batches_are_small_and_a_sweep_goes_on(
    ledger: Ledger, records: RecordStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BATCH_CALLS", 4)
    monkeypatch.setattr(module, "_MOST_ROLLOUTS", 6)
    records.append([call(f"r{n}", number) for n in range(8) for number in range(9 if n == 3 else 2)])
    sizes: list[int] = []
    delete = records.delete_old

    def deleting(rollouts: Any, *given: Any) -> Any:
        sizes.append(sum(len(rollout.call_ids) for rollout in rollouts))
        return delete(rollouts, *given)

    monkeypatch.setattr(records, "delete_old", deleting)
    retention = retention_of(records, ledger, tmp_path)
    assert await retention.sweep() is True
    assert sizes == [4, 2, 9, 4]
    assert await retention.sweep() is False
    assert records.count() == 0


async def test_nothing_is_deleted_without_its_line(
    ledger: Ledger, records: RecordStore, tmp_path: Path
) -> None:
    (tmp_path / AUDIT_FILE).mkdir()
    records.append([call("a")])
    with pytest.raises(Unavailable):
        await retention_of(records, ledger, tmp_path).sweep()
    assert records.count() == 1


async def test_a_failed_sweep_is_logged_and_repeated(
    ledger: Ledger,
    records: RecordStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "_EVERY_SECONDS", 0.0)
    records.append([call("a")])
    failures = [OperationalError("delete", {}, Exception("database is locked")), Unavailable("no ledger")]
    find = records.find_old

    def finding(*given: Any) -> Any:
        if failures:
            raise failures.pop()
        return find(*given)

    monkeypatch.setattr(records, "find_old", finding)
    running = asyncio.create_task(retention_of(records, ledger, tmp_path).run())
    async with asyncio.timeout(10):
        while records.count():
            await asyncio.sleep(0.01)
    running.cancel()
    assert "database is locked" in caplog.text
    assert caplog.text.count("old calls are not deleted; the next try is in an hour") == 2


@pytest.mark.parametrize("given", ["30", "12h", "0d", "-1d", "1.5d", ""])
def test_the_option_takes_days_and_weeks(given: str) -> None:
    refused = CliRunner().invoke(cli, ["serve", "--keep-calls", given])
    assert refused.exit_code == 2
    assert "30d or 8w" in refused.output


def test_the_supervisor_tells_the_api(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from insitu.backend.plan.compute import Asked, choose
    from insitu.backend.plan.cpu import read_cpu
    from insitu.backend.plan.settings import ServeSettings
    from insitu.backend.serve import Supervisor

    compute = choose(read_cpu(), "cpu", Asked(dtype="float32"))
    made = ServeSettings(tmp_path, "cpu", compute, "merged", "shared", "k" * 32)
    for keep in (None, KEEP):
        supervisor: Any = Supervisor(replace(made, keep_calls_seconds=keep), tmp_path, print)
        assert parse(supervisor._api.arguments).keep_calls_seconds == keep


@pytest.mark.alone
def test_a_question_costs_the_rollouts_asked_of_not_all_that_are_open(ledger: Ledger) -> None:
    """Beside 2,000 open groups of 20 rollouts with 20 calls each, as with 20."""
    ledger.register_run("p", "many", "m", None, {}, {})

    def asked(first: int, last: int) -> float:
        for number in range(first, last):
            rollouts = [f"many-{number}-{n}" for n in range(20)]
            trajectories = [Trajectory(name, [f"{name}-{n}" for n in range(20)], 1.0) for name in rollouts]
            ledger.put_group(TrajectoryGroup(f"g{number}", "many", trajectories), "hash")
        old = [OldRollout(f"many-3-{n % 20}" if n < 20 else f"gone-{n}", [f"c{n}"]) for n in range(500)]
        took: list[float] = []
        for _ in range(5):
            began = time.process_time()
            found = referred_calls(ledger)(old)
            took.append(time.process_time() - began)
            assert found == {f"c{n}" for n in range(20)}
        return min(took)

    few, many = asked(0, 20), asked(20, 2000)
    print(f"500 rollouts beside 20 open groups {1e3 * few:.1f} ms, beside 2,000 {1e3 * many:.1f} ms")
    assert many < 4 * few + 0.01
