"""A run whose last checkpoints are damaged goes back, and every group is trained again exactly once."""

from __future__ import annotations

import pytest

from insitu.backend.ledger import Job, Ledger
from insitu.errors import Conflict
from insitu.types import GroupState, JobState, RunState, StepSettings

DAMAGE = "checkpoint 000003: adapter/adapter_model.safetensors has other content"


def queue(ledger: Ledger, make_group, name: str) -> Job:
    ledger.put_group(make_group(name), f"hash-{name}")
    return ledger.create_job("run", f"key-{name}", [name], StepSettings(), f"request-{name}")


def train(ledger: Ledger, job: Job | None = None) -> Job:
    """Commit the next job as the supervisor does."""
    job = job or ledger.next_jobs()[0]
    job = ledger.transition_job(job.id, JobState.RUNNING)
    step = ledger.get_run("run").step + 1
    return ledger.commit_step(job.id, step, {"loss": float(step)}, f"path-{step}", f"sha-{step}")


@pytest.fixture
def three(ledger: Ledger, make_group) -> list[Job]:
    """A ready run of three steps, the third one pinned."""
    done = [train(ledger, queue(ledger, make_group, f"g{step}")) for step in (1, 2, 3)]
    ledger.transition_run("run", RunState.LOADING)
    ledger.transition_run("run", RunState.READY)
    ledger.pin_checkpoint("run", 3)
    return done


def test_lost_steps_are_queued_again_before_younger_jobs(
    ledger: Ledger, three: list[Job], make_group
) -> None:
    younger = queue(ledger, make_group, "g4")
    run = ledger.fall_back("run", 1, DAMAGE)
    assert (run.step, run.lost_steps) == (1, [2, 3])
    assert ledger.list_runs() == [run]
    assert [step.step for step in ledger.steps("run")] == [1]
    assert [kept.step for kept in ledger.checkpoints("run")] == [1]
    groups = [ledger.group_record("run", f"g{n}") for n in (1, 2, 3)]
    claimed = (GroupState.CLAIMED, None)
    assert [(group.state, group.step) for group in groups] == [(GroupState.CONSUMED, 1), claimed, claimed]
    lost = ledger.get_job(three[2].id)
    assert (lost.state, lost.step, lost.metrics, lost.progress) == (JobState.QUEUED, None, {}, 0.0)
    assert lost.finished_at is None
    event = ledger.events_since(lost.id, 0)[-1]
    assert (event.kind, event.data) == ("requeued", {"lost_step": 3, "cause": DAMAGE})
    order = [train(ledger).id for _ in range(3)]
    assert order == [three[1].id, three[2].id, younger.id]
    assert ledger.get_run("run").lost_steps == []
    assert [(s.step, s.job_id) for s in ledger.steps("run")] == [
        (1, three[0].id),
        *[(number, job_id) for number, job_id in enumerate(order, 2)],
    ]
    assert [(kept.step, kept.pinned) for kept in ledger.checkpoints("run")] == [
        (1, False),
        (2, False),
        (3, True),
        (4, False),
    ]


def test_the_same_submission_returns_the_job_that_trains_again(ledger: Ledger, three: list[Job]) -> None:
    ledger.fall_back("run", 2, DAMAGE)
    again = ledger.create_job("run", "key-g3", ["g3"], StepSettings(), "request-g3")
    assert (again.id, again.state) == (three[2].id, JobState.QUEUED)
    with pytest.raises(Conflict, match="claimed"):
        ledger.create_job("run", "another", ["g3"], StepSettings(), "request")


def test_a_run_falls_back_again_before_all_is_repeated(ledger: Ledger, three: list[Job]) -> None:
    ledger.fall_back("run", 1, DAMAGE)
    train(ledger)
    assert ledger.fall_back("run", 0, DAMAGE).lost_steps == [1, 2, 3]
    assert [train(ledger).id for _ in range(3)] == [job.id for job in three]


@pytest.mark.parametrize("step", [-1, 3, 4])
def test_only_earlier_steps_are_gone_back_to(ledger: Ledger, three: list[Job], step: int) -> None:
    with pytest.raises(Conflict, match="is at step 3"):
        ledger.fall_back("run", step, DAMAGE)
    assert ledger.get_run("run").step == len(three)


def test_a_step_that_cannot_be_repeated_fails_the_run(ledger: Ledger, three: list[Job]) -> None:
    ledger.fall_back("run", 1, DAMAGE)
    ledger.transition_job(three[1].id, JobState.RUNNING)
    ledger.fail_job(three[1].id, "call c2 is not on record")
    run = ledger.get_run("run")
    assert (run.state, run.step, run.lost_steps) == (RunState.FAILED, 1, [])
    assert run.error is not None
    assert "step 2 was lost with its checkpoint" in run.error
    assert "call c2 is not on record" in run.error
    assert "go on from step 1: POST /v1/runs" in run.error
    assert ledger.group_record("run", "g2").state is GroupState.RECEIVED
    reopened = ledger.register_run("project", "run", "model", run.lora, {}, {})
    assert reopened.state is RunState.REGISTERED
    assert train(ledger).id == three[2].id, "the other groups are still trained"


def test_cancelling_a_repetition_leaves_the_run_where_it_is(ledger: Ledger, three: list[Job]) -> None:
    ledger.fall_back("run", 2, DAMAGE)
    ledger.transition_job(three[2].id, JobState.CANCELLED)
    run = ledger.get_run("run")
    assert (run.state, run.step, run.lost_steps) == (RunState.READY, 2, [])
