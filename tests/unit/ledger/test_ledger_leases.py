"""Leases of versions: taken, renewed, ended; what is leased is kept."""

from __future__ import annotations

import time

import pytest
import sqlalchemy as sa

from insitu.backend.ledger import Ledger, schema
from insitu.errors import Conflict, NotFound
from insitu.types import JobState, LeaseState, RunState, StepSettings


@pytest.fixture
def trained(ledger: Ledger, make_group) -> Ledger:
    """A ready run with five committed steps."""
    for state in (RunState.LOADING, RunState.READY):
        ledger.transition_run("run", state)
    for step in range(1, 6):
        ledger.put_group(make_group(f"g{step}"), "hash")
        job = ledger.create_job("run", f"key-{step}", [f"g{step}"], StepSettings(), "request")
        ledger.transition_job(job.id, JobState.RUNNING)
        ledger.commit_step(job.id, step, {}, f"runs/run/checkpoints/{step:06d}", f"sha-{step}")
    return ledger


def let_expire(ledger: Ledger, lease_id: str, seconds_ago: float = 1.0) -> None:
    table = schema.leases
    with ledger._engine.begin() as connection:
        passed = sa.update(table).where(table.c.id == lease_id)
        connection.execute(passed.values(expires_at=time.time() - seconds_ago))


def test_lease_waits_is_ready_and_ends(trained: Ledger):
    lease = trained.take_lease("run", "one", 3, 60)
    assert (lease.state, lease.model, lease.step) == (LeaseState.WAITING, "run@3", 3)
    trained.explain_lease(lease, "it waits for a step")
    assert trained.get_lease("run", "one").reason == "it waits for a step"
    ready = trained.make_lease_ready(lease)
    assert (ready.state, ready.reason) == (LeaseState.READY, "")
    assert trained.open_leases() == [ready]
    for _ in range(2):
        ended = trained.release_lease("run", "one")
        assert (ended.state, ended.reason) == (LeaseState.ENDED, "released")
    assert trained.make_lease_ready(lease).state is LeaseState.ENDED
    assert trained.open_leases() == []


def test_renewal_moves_the_end_and_nothing_else(trained: Ledger):
    trained.make_lease_ready(trained.take_lease("run", "one", 0, 5))
    renewed = trained.take_lease("run", "one", 0, 500)
    assert renewed.state is LeaseState.READY
    assert renewed.expires_at > time.time() + 400
    with pytest.raises(Conflict, match="is of run@0, not of run@3"):
        trained.take_lease("run", "one", 3, 5)


def test_ended_lease_is_not_renewed(trained: Ledger):
    trained.take_lease("run", "one", 3, 60)
    let_expire(trained, "one")
    with pytest.raises(Conflict, match="of run@3 has ended: not renewed in time"):
        trained.take_lease("run", "one", 3, 60)  # even if the supervisor has not seen it yet
    assert trained.open_leases() == []
    assert trained.get_lease("run", "one").reason == "not renewed in time"
    trained.take_lease("run", "two", 3, 60)
    assert [lease.id for lease in trained.end_leases("the backend was restarted")] == ["two"]
    with pytest.raises(Conflict, match="has ended: the backend was restarted"):
        trained.take_lease("run", "two", 3, 60)


def test_missing_steps_are_rejected_with_those_that_exist(trained: Ledger):
    trained.prune_checkpoints("run", 2)
    with pytest.raises(NotFound, match="step 2 of run 'run' is not kept; kept are 0, 4, 5"):
        trained.take_lease("run", "one", 2, 60)
    with pytest.raises(NotFound, match="no run 'other'"):
        trained.take_lease("other", "one", 0, 60)
    with pytest.raises(NotFound, match="no lease 'one'"):
        trained.release_lease("run", "one")


def test_runs_that_are_not_served_are_rejected(trained: Ledger):
    trained.transition_run("run", RunState.FAILED, "no memory")
    with pytest.raises(Conflict, match="run 'run' is failed: no memory"):
        trained.take_lease("run", "one", 3, 60)
    trained.transition_run("run", RunState.CLOSED)
    assert trained.take_lease("run", "one", 3, 60).state is LeaseState.WAITING


def test_leased_steps_are_kept(trained: Ledger):
    trained.take_lease("run", "one", 1, 60)
    assert trained.prune_checkpoints("run", 2) == [2, 3]
    with pytest.raises(Conflict, match="checkpoint 1 of run 'run' is leased"):
        trained.forget_checkpoint("run", 1)
    trained.release_lease("run", "one")
    assert trained.prune_checkpoints("run", 2) == [1]


def test_ended_leases_are_forgotten_after_a_day(trained: Ledger):
    trained.take_lease("run", "old", 3, 60)
    trained.release_lease("run", "old")
    let_expire(trained, "old", 25 * 3600)
    trained.take_lease("run", "new", 3, 60)
    with pytest.raises(NotFound):
        trained.get_lease("run", "old")


def test_waiting_step_says_what_it_waits_for(trained: Ledger, make_group):
    trained.put_group(make_group("next"), "hash")
    job = trained.create_job("run", "key-next", ["next"], StepSettings(), "request")
    for _ in range(2):
        trained.set_waiting(job.id, "waits for the evaluation of run@3")
    assert trained.get_job(job.id).phase == "waits for the evaluation of run@3"
    events = [
        event.data.get("phase") for event in trained.events_since(job.id, 0) if event.kind == "progress"
    ]
    assert events == ["waits for the evaluation of run@3"]
    trained.transition_job(job.id, JobState.CANCELLED)
    trained.set_waiting(job.id, "too late")
    assert trained.get_job(job.id).phase == "waits for the evaluation of run@3"
