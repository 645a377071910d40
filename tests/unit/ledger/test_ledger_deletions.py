"""A deleted run leaves no row, and nothing is deleted that another run, a job or a lease still needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import func, select

from insitu.backend.ledger import Ledger, schema
from insitu.backend.ledger.rows import Origin
from insitu.errors import Conflict, NotFound
from insitu.types import JobState, LoraSettings, RunState, StepSettings, TrajectoryGroup

Make = Callable[..., TrajectoryGroup]


def train(ledger: Ledger, make_group: Make, run: str, step: int) -> None:
    ledger.put_group(make_group(f"g{step}", run), "h")
    job = ledger.create_job(run, f"k{step}", [f"g{step}"], StepSettings(), "h")
    ledger.transition_job(job.id, JobState.RUNNING)
    ledger.commit_step(job.id, step, {"reward/mean": 0.5}, "/path", "digest")


def num_rows(ledger: Ledger) -> dict[str, int]:
    """Rows of every table but that of the ledger itself."""
    with ledger._engine.begin() as connection:
        counted = {
            table.name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in schema.metadata.sorted_tables
            if table is not schema.meta
        }
    return {name: number for name, number in counted.items() if number}


@pytest.fixture
def closed(ledger: Ledger, make_group: Make) -> Ledger:
    """A ledger whose run has had everything that a run can have."""
    train(ledger, make_group, "run", 1)
    train(ledger, make_group, "run", 2)
    ledger.pin_checkpoint("run", 1)
    ledger.set_precision("run", "float32")
    ledger.transition_run("run", RunState.LOADING)
    ledger.transition_run("run", RunState.READY)
    ledger.release_lease("run", ledger.take_lease("run", "l", 1, 60.0).id)
    ledger.put_group(make_group("unused"), "h")
    ledger.transition_run("run", RunState.CLOSED)
    return ledger


def test_no_row_is_left(closed: Ledger) -> None:
    assert {"runs", "jobs", "groups", "rollouts", "steps", "checkpoints", "pins", "leases"} <= num_rows(
        closed
    ).keys()
    assert closed.delete_run("run").step == 2
    assert num_rows(closed) == {}
    with pytest.raises(NotFound):
        closed.delete_run("run")


def test_rows_of_other_runs_stay(closed: Ledger, make_group: Make) -> None:
    closed.register_run("p", "other", "model", LoraSettings(), {}, {})
    train(closed, make_group, "other", 1)
    closed.delete_run("run")
    assert [run.name for run in closed.list_runs()] == ["other"]
    assert [step.step for step in closed.steps("other")] == [1]
    assert num_rows(closed)["events"] == 3


def test_an_open_run_is_not_deleted(closed: Ledger) -> None:
    closed.register_run("project", "run", "model", LoraSettings(), {}, {})
    with pytest.raises(Conflict, match="is registered; only a closed run is deleted"):
        closed.delete_run("run")


def test_a_failed_run_with_a_job_is_not_deleted(ledger: Ledger, make_group: Make) -> None:
    ledger.put_group(make_group("g"), "h")
    job = ledger.create_job("run", "k", ["g"], StepSettings(), "h")
    ledger.transition_run("run", RunState.FAILED, "broken")
    with pytest.raises(Conflict, match=f"still has jobs: {job.id}"):
        ledger.delete_run("run")


def test_a_source_that_is_not_copied_yet_is_not_deleted(closed: Ledger) -> None:
    closed.register_run("p", "child", "model", None, {}, {}, Origin("run@2", None))
    with pytest.raises(Conflict, match="another run starts from it"):
        closed.delete_run("run")
    closed.commit_start("child", "/path", "digest")
    closed.delete_run("run")
    assert closed.get_run("child").source == "run@2"


def test_a_teacher_of_an_open_job_is_not_deleted(closed: Ledger, make_group: Make) -> None:
    closed.register_run("p", "pupil", "model", LoraSettings(), {}, {})
    closed.put_group(make_group("lesson", "pupil"), "h")
    settings = StepSettings(method="distill", teacher="run@2")
    job = closed.create_job("pupil", "k", ["lesson"], settings, "h")
    with pytest.raises(Conflict, match="run@2 is the reference or teacher"):
        closed.delete_run("run")
    closed.cancel_job(job.id)
    closed.delete_run("run")
