"""Files of an earlier release open today: a run directory, the ledger and the recorded model calls."""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from insitu.backend.ledger import Ledger, ledger_url
from insitu.cli.trajectories import trajectories
from insitu.config.dump import dump_config
from insitu.config.load import load_config
from insitu.harness.files.run_directory import RunDirectory
from insitu.harness.finetune import finetune
from insitu.harness.interfaces import events
from insitu.harness.interfaces.progress import Progress
from insitu.harness.loop.state import fold
from insitu.harness.options import with_options
from insitu.records.store import RecordStore
from insitu.types import JobState, RunState
from tests.support.standin_backend import StandinBackend
from tests.support.standin_engine import Behaviour

WRITTEN = Path(__file__).parents[1] / "fixtures" / "written_by_c6cf19c"
RUN_ID = "run_f6d5ca4d"
TRAINED = [f"{RUN_ID}.e0.0.0.ee6b339b", f"{RUN_ID}.e0.0.1.f7e7d96c"]
DROPPED = [f"{RUN_ID}.e0.1.0.d8c41511", f"{RUN_ID}.e0.1.1.5d7de737"]


def copied(to: Path, api_port: int = 1, gateway_port: int = 1) -> Path:
    """Copy the files, at home in `to`, with their databases; nothing answers at the default ports."""
    for source in (path for path in WRITTEN.rglob("*") if path.is_file()):
        target = to / source.relative_to(WRITTEN)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text().replace("/srv/insitu", str(to))
        if source.suffix == ".sql":
            with closing(sqlite3.connect(target.with_suffix(".db"))) as database:
                database.executescript(text)
        elif source.name in ("config.yml", "config.json"):
            target.write_text(text.replace("7623", str(api_port)).replace("8000", str(gateway_port)))
        else:
            target.write_text(text)
    return to


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return copied(tmp_path)


def test_the_same_configuration_resumes_the_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home / "project")
    loaded = with_options(load_config("config.yml"), {"validation_dataset": "validation.json"})
    config = loaded.config
    with RunDirectory.open(config.finetuning.output_dir, dump_config(config)) as run:
        assert (run.resumed, run.run_id) == (True, RUN_ID)
        state = fold(events.read(run.journal), config.finetuning.curriculum_learning)
    assert (state.next_epoch, state.step, state.submitted) == (1, 1, None)
    assert state.best == events.Best(1, 0.75, str(home / "state/runs/small/checkpoints/000001"))
    assert [(entry["step"], entry["avg_reward"]) for entry in state.validations] == [(0, 0.25), (1, 0.75)]
    assert state.epochs[0]["account"]["dropped"] == {"zero_variance": 2}
    assert state.epochs == [json.loads((home / "project/output/training_metrics.jsonl").read_text())]


def test_rollouts_are_listed_and_shown(home: Path) -> None:
    run = str(home / "project" / "output")

    def insitu(*arguments: str) -> str:
        result = CliRunner().invoke(trajectories, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    listed = insitu("list", run, "--epoch", "0").splitlines()[1:]
    assert [line.split()[-1] for line in listed] == TRAINED + DROPPED
    shown = json.loads(insitu("show", run, TRAINED[1], "--json"))
    assert shown["reward"] == 0.5
    first, second = shown["calls"]
    assert [first["id"], second["id"]] == shown["call_ids"]
    assert first["output_ids"] == second["output_ids"] == [1000, 1001, 1002, 1003]
    assert second["logprobs"] == [-0.5, -1.5, -2.5, -3.5]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert "zero-variance" in insitu("show", run, DROPPED[0]).replace("_", "-")


def test_the_ledger_opens_with_every_row(home: Path) -> None:
    with Ledger(ledger_url(home / "state")) as ledger:
        (run,) = ledger.list_runs()
        assert (run.name, run.base_model, run.state, run.step) == ("small", "tiny", RunState.READY, 1)
        assert ledger.precisions() == {}
        (step,) = ledger.steps("small")
        job = ledger.get_job(step.job_id)
        assert (job.state, job.step, job.metrics["account/calls_trained"]) == (JobState.SUCCEEDED, 1, 4.0)
        assert [event.kind for event in ledger.events_since(job.id, 0)][-1] == "succeeded"
        (group,) = ledger.groups_of_job(job.id)
        assert [trajectory.rollout_id for trajectory in group.trajectories] == TRAINED
        assert [trajectory.reward for trajectory in group.trajectories] == [0.0, 0.5]
        (checkpoint,) = ledger.checkpoints("small")
        assert (checkpoint.step, checkpoint.pinned) == (1, True)
        assert (Path(checkpoint.path) / "manifest.json").is_file()
        ledger.set_precision("small", "float32")
        assert ledger.precisions() == {"small": "float32"}


def test_recorded_calls_read_back_with_ids_and_logprobs(home: Path) -> None:
    store = RecordStore(f"sqlite:///{home / 'state' / 'calls.db'}")
    try:
        calls = [call for rollout in TRAINED + DROPPED for call in store.by_rollout(rollout)]
        assert len(calls) == 8
        assert store.get([call.id for call in calls]) == calls
        for call in calls:
            assert list(call.output_ids) == [1000, 1001, 1002, 1003]
            assert list(call.logprobs) == [-0.5, -1.5, -2.5, -3.5]
            assert (call.run, call.policy_step, call.finish_reason) == ("small", 0, "stop")
        first, second = calls[:2]
        assert len(second.messages) == len(first.messages) + 2
        assert second.messages[: len(first.messages)] == first.messages
        written = json.loads(
            (home / "project/output/trajectories/epoch-0000.jsonl").read_text().split("\n")[0]
        )
        assert [call.id for call in calls[:2]] == written["call_ids"]
        assert list(first.prompt_ids) == written["calls"][0]["prompt_ids"]
    finally:
        store.close()


async def test_the_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State directory and run directory are both of the earlier release; a second epoch is trained."""
    monkeypatch.setattr("insitu.harness.loop.epoch_trainer._POLL_SECONDS", 0.02)
    monkeypatch.setattr("insitu.harness.loop.epoch_trainer.write_plot", lambda *_: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "small_agent", raising=False)
    backend = StandinBackend(tmp_path / "state", Behaviour(num_tokens=4), train_seconds=0.01)
    project = copied(tmp_path, backend.port, backend.gateway_port) / "project"
    monkeypatch.chdir(project)
    config = project / "config.yml"
    config.write_text(config.read_text().replace("num_epochs: 1", "num_epochs: 2"))
    loaded = with_options(load_config(config), {"validation_dataset": "validation.json"})
    async with backend:
        summary = await finetune(loaded, Progress(), "insitu finetune")
        assert summary.outcome == "succeeded", summary.reason
        assert (backend.num_steps, backend.ledger.get_run("small").step) == (1, 2)
    lines = (project / "output" / "training_metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    validations = json.loads((project / "output" / "validation_history.json").read_text())
    assert [entry["step"] for entry in validations if not entry.get("remeasured")] == [0, 1, 2]
    monkeypatch.delitem(sys.modules, "small_agent", raising=False)
