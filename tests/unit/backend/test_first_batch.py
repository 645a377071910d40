"""A run's first batch chooses the probe's sequences: one that the model cannot have sampled leaves none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="the trainer's ranks are Ray actors")

from insitu.backend.jobs import StepRunner
from insitu.backend.ledger import Ledger, ledger_url
from insitu.backend.progress.phases import Phases
from insitu.records.store import RecordStore
from insitu.training.packing import Limits
from insitu.types import JobState, LoraSettings, ModelCall, StepSettings, Trajectory, TrajectoryGroup


def call_of(rollout_id: str, token: int) -> ModelCall:
    return ModelCall(
        id=f"call-{rollout_id}",
        rollout_id=rollout_id,
        model="run",
        run="run",
        policy_step=0,
        policy_version="run@0",
        prompt_ids=[1, token],
        output_ids=[2],
        logprobs=[-0.5],
        finish_reason="stop",
    )


async def test_a_token_beyond_the_vocabulary_does_not_reach_the_probe(tmp_path: Path) -> None:
    host: Any = SimpleNamespace(trainer=SimpleNamespace(limits=Limits(97, None, 64, can_branch=True)))
    host.reference = lambda _run, _settings: None
    host.replicas = SimpleNamespace(joined=list)
    settings: Any = SimpleNamespace(runs_dir=tmp_path / "runs")
    traffic: Any = SimpleNamespace(runs={})
    records = RecordStore(f"sqlite:///{tmp_path}/calls.db")
    with Ledger(ledger_url(tmp_path)) as ledger:
        ledger.register_run("p", "run", "m", LoraSettings(), {}, {})
        calls = [call_of("a", 5), call_of("b", 2**31 - 1)]
        records.append(calls)
        rollouts = [Trajectory(call.rollout_id, [call.id], float(i)) for i, call in enumerate(calls)]
        ledger.put_group(TrajectoryGroup("g", "run", rollouts), "h")
        job = ledger.create_job("run", "k", ["g"], StepSettings(), "h")
        said: list[str] = []
        await StepRunner(settings, ledger, records, traffic, Phases(said.append)).run(job, host)
        failed = ledger.get_job(job.id)
    records.close()
    assert not list(tmp_path.rglob("probe.json"))
    assert failed.state is JobState.FAILED
    assert "token id 2147483647, the base model knows 97" in str(failed.error)
    (line,) = said
    assert "run run: a step failed, the run is as it was: " in line
    assert "token id 2147483647" in line
