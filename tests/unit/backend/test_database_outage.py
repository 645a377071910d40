"""A database that is gone for a while interrupts a job; any other error ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

pytest.importorskip("ray", reason="the trainer's ranks are Ray actors")

from insitu.backend.jobs import StepRunner
from insitu.backend.ledger import Ledger, ledger_url
from insitu.errors import Unavailable
from insitu.types import JobState, LoraSettings, RunState, StepSettings, Trajectory, TrajectoryGroup


def lost_ledger() -> Exception:
    error = Unavailable("the ledger cannot write: server closed the connection")
    error.__cause__ = lost_records()
    return error


def lost_records() -> Exception:
    return OperationalError("SELECT", {}, Exception("server closed the connection"))


async def run_into(error: Exception, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a job whose attempt raises the error; return its id."""
    ledger.register_run("p", "run", "m", LoraSettings(), {}, {})
    for state in (RunState.LOADING, RunState.READY):
        ledger.transition_run("run", state)
    ledger.put_group(TrajectoryGroup("g", "run", [Trajectory("r", ["c"], 1.0)]), "h")
    job = ledger.create_job("run", "k", ["g"], StepSettings(), "h")
    nothing: Any = None
    runner = StepRunner(nothing, ledger, nothing, nothing)

    async def attempts(*_: object) -> None:
        raise error

    monkeypatch.setattr(runner, "_attempts", attempts)
    if isinstance(error, ValueError):
        await runner.run(job, nothing)
    else:
        with pytest.raises(Unavailable, match=r"is interrupted: .*server closed the connection"):
            await runner.run(job, nothing)
    return job.id


@pytest.mark.parametrize("error", [lost_ledger(), lost_records()], ids=["ledger", "records"])
async def test_a_job_outlives_the_database_s_absence(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger(ledger_url(tmp_path)) as ledger:
        job_id = await run_into(error, ledger, monkeypatch)
        assert ledger.requeue_running() == [job_id]  # as the supervisor does once the ledger answers


async def test_another_error_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger(ledger_url(tmp_path)) as ledger:
        job_id = await run_into(ValueError("wrong"), ledger, monkeypatch)
        assert ledger.get_job(job_id).state is JobState.FAILED
