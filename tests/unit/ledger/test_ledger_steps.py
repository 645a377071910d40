from __future__ import annotations

import pytest
import sqlalchemy as sa

from insitu.backend.ledger import Ledger, schema
from insitu.errors import Conflict, Unavailable
from insitu.types import GroupState, JobState, StepSettings


@pytest.fixture
def running(ledger: Ledger, make_group):
    ledger.put_group(make_group("g"), "hash")
    job = ledger.create_job("run", "key", ["g"], StepSettings(), "request")
    return ledger.transition_job(job.id, JobState.RUNNING)


def test_a_commit_is_everything_at_once(ledger: Ledger, running):
    done = ledger.commit_step(running.id, 1, {"loss": 0.5}, "runs/run/checkpoints/000001", "sha")
    assert (done.state, done.step, done.metrics) == (JobState.SUCCEEDED, 1, {"loss": 0.5})
    assert ledger.get_run("run").step == 1
    record = ledger.group_record("run", "g")
    assert (record.state, record.step, record.job_id) == (GroupState.CONSUMED, 1, running.id)
    assert [(c.step, c.manifest_sha256) for c in ledger.checkpoints("run")] == [(1, "sha")]
    assert [(s.step, s.job_id) for s in ledger.steps("run")] == [(1, running.id)]
    assert ledger.events_since(running.id, 0)[-1].data == {"step": 1, "metrics": {"loss": 0.5}}
    with pytest.raises(Conflict, match="consumed"):
        ledger.create_job("run", "k2", ["g"], StepSettings(), "h")


def test_a_commit_heard_twice_counts_once(ledger: Ledger, running):
    first = ledger.commit_step(running.id, 1, {}, "path", "sha")
    assert ledger.commit_step(running.id, 1, {}, "path", "sha") == first
    with pytest.raises(Conflict):
        ledger.commit_step(running.id, 1, {}, "path", "another sha")
    assert ledger.get_run("run").step == 1


@pytest.mark.parametrize("step", [0, 2, 7, -1])
def test_steps_have_no_gaps(ledger: Ledger, running, step):
    with pytest.raises(Conflict, match=f"the next is 1, not {step}"):
        ledger.commit_step(running.id, step, {}, "path", "sha")
    assert ledger.get_job(running.id).state is JobState.RUNNING


def test_only_a_running_job_commits(ledger: Ledger, running):
    ledger.requeue_running()
    with pytest.raises(Conflict, match="queued and cannot become succeeded"):
        ledger.commit_step(running.id, 1, {}, "path", "sha")


def test_a_commit_that_fails_half_way_leaves_nothing(ledger: Ledger, running, monkeypatch):
    from insitu.backend.ledger import jobs

    def broken(*_args):
        raise RuntimeError("half way")

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "add_event", broken)
        with pytest.raises(RuntimeError, match="half way"):
            ledger.commit_step(running.id, 1, {}, "path", "sha")
    assert ledger.get_run("run").step == 0
    assert ledger.steps("run") == []
    assert ledger.checkpoints("run") == []
    assert ledger.group_record("run", "g").state is GroupState.CLAIMED
    assert ledger.commit_step(running.id, 1, {}, "path", "sha").step == 1


def test_a_write_error_of_the_disk_is_never_acknowledged(ledger: Ledger, running):
    def disk_full(_connection):
        raise sa.exc.OperationalError("INSERT", {}, Exception("database or disk is full"))

    future = ledger._writer.submit(disk_full)
    with pytest.raises(Unavailable, match="disk is full"):
        future.result(30)
    assert ledger.commit_step(running.id, 1, {}, "path", "sha").step == 1


def test_metrics_that_are_not_finite_stay_readable(ledger: Ledger, running):
    done = ledger.commit_step(running.id, 1, {"loss": float("nan")}, "path", "sha")
    assert done.metrics == {"loss": None}


def test_foreign_keys_are_enforced(ledger: Ledger):
    row = {"run": "run", "step": 3, "path": "p", "manifest_sha256": "s", "created_at": 0.0}
    future = ledger._writer.submit(lambda c: c.execute(sa.insert(schema.checkpoints).values(**row)))
    with pytest.raises(sa.exc.IntegrityError):
        future.result(30)
