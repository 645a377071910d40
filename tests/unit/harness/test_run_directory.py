"""A run's directory belongs to one configuration and to one process at a time."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from insitu.errors import Conflict, InvalidRequest
from insitu.harness.files.ahead_stores import Slot
from insitu.harness.files.json_lines import DamagedFile
from insitu.harness.files.run_directory import RunDirectory
from insitu.harness.rollouts.rollout import Rollout
from insitu.system.durable import write_atomic
from insitu.types import Ending

DUMP: dict[str, Any] = {
    "finetuning": {"seed": 0, "num_epochs": 3, "output_dir": "out"},
    "llms": {"m": {"model_name": "tiny", "api_key": "**********"}},
}
OTHER: dict[str, Any] = {**DUMP, "finetuning": {**DUMP["finetuning"], "seed": 7}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "run"


def test_new_run(path: Path) -> None:
    with RunDirectory.open(path, DUMP) as run:
        assert not run.resumed
        assert re.fullmatch(r"run_[0-9a-f]{8}", run.run_id)
        assert run.path == path
        run.journal.append("run_started", {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    config = json.loads((path / "config.json").read_text())
    assert config["config"] == DUMP
    assert config["run_id"] == run.run_id
    assert len(config["fingerprint"]) >= 16
    assert sorted(p.name for p in path.iterdir()) == [".lock", "config.json", "journal.jsonl"]


def test_two_runs_have_two_ids(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "a", DUMP) as a, RunDirectory.open(tmp_path / "b", DUMP) as b:
        assert a.run_id != b.run_id


def test_same_configuration_continues(path: Path) -> None:
    with RunDirectory.open(path, DUMP) as first:
        first.journal.append("epoch_ended", {"epoch": 0})
        started = json.loads((path / "config.json").read_text())["started_at"]
    longer = {**DUMP, "finetuning": {**DUMP["finetuning"], "num_epochs": 9}}
    with RunDirectory.open(path, longer) as second:
        assert second.resumed
        assert second.run_id == first.run_id
        assert [e["epoch"] for e in second.journal.records()] == [0]
    config = json.loads((path / "config.json").read_text())
    assert config["config"] == longer
    assert config["started_at"] == started


def test_other_configuration_is_refused_line_by_line(path: Path) -> None:
    with RunDirectory.open(path, DUMP) as run:
        run.store("epoch-0000").append(Rollout("r", "e", 0, Ending.COMPLETED, 1.0))
    before = (path / "config.json").read_bytes()
    with pytest.raises(Conflict) as caught:
        RunDirectory.open(path, OTHER)
    assert run.run_id in caught.value.message
    assert "\n    finetuning.seed: 0 → 7" in caught.value.message
    assert "-o finetuning.output_dir" in caught.value.hint
    assert f"delete {path}" in caught.value.hint
    assert (path / "config.json").read_bytes() == before
    with RunDirectory.open(path, DUMP) as again:  # the refusal left no lock behind
        assert again.resumed


def test_a_run_that_recorded_nothing_gives_way_to_another_configuration(path: Path) -> None:
    with RunDirectory.open(path, DUMP) as first:
        first.journal.append("inputs", {"inputs": [], "changed": [], "changes": []})
        first.journal.append("registered", {"name": "small", "url": "http://127.0.0.1:7623"})
        first.store("epoch-0000")  # opened, and no rollout has ended
    with RunDirectory.open(path, OTHER) as second:
        assert not second.resumed
        assert second.run_id != first.run_id
        assert second.journal.records() == []
        assert second.store_names() == []
    assert json.loads((path / "config.json").read_text())["config"] == OTHER


@pytest.mark.parametrize("event", ["validated", "step", "best", "of a newer release"])
def test_a_run_with_any_result_keeps_its_directory(path: Path, event: str) -> None:
    with RunDirectory.open(path, DUMP) as run:
        run.journal.append(event, {})
    with pytest.raises(Conflict, match="another configuration"):
        RunDirectory.open(path, OTHER)


def test_second_process_is_refused_with_the_pid_of_the_first(path: Path) -> None:
    script = (
        "import json, sys; from pathlib import Path\n"
        "from insitu.harness.files.run_directory import RunDirectory\n"
        "run = RunDirectory.open(Path(sys.argv[1]), json.loads(sys.argv[2]))\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(path), json.dumps(DUMP)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == b"ready\n"
        with pytest.raises(Conflict, match=rf"pid {other.pid}\b") as caught:
            RunDirectory.open(path, DUMP)
        assert "finetuning.output_dir" in caught.value.hint
    finally:
        other.kill()
        other.wait(30)
        other.stdin.close()
        other.stdout.close()
    with RunDirectory.open(path, DUMP) as run:  # the lock died with its process
        assert run.resumed
        assert (path / ".lock").read_text() == str(os.getpid())


def test_lock_holds_within_a_process_and_close_releases_it(path: Path) -> None:
    run = RunDirectory.open(path, DUMP)
    with pytest.raises(Conflict, match=str(os.getpid())):
        RunDirectory.open(path, DUMP)
    run.close()
    run.close()
    RunDirectory.open(path, DUMP).close()


def test_children_do_not_keep_the_lock(path: Path) -> None:
    with RunDirectory.open(path, DUMP):
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
        )
    try:
        RunDirectory.open(path, DUMP).close()
    finally:
        child.communicate(timeout=10)


@pytest.mark.parametrize(
    "name", ["journal.jsonl", "reward_plot.png", "trajectories", "training_metrics.jsonl"]
)
def test_directory_of_something_else_is_not_overwritten(path: Path, name: str) -> None:
    path.mkdir(parents=True)
    (path / name).write_text("precious")
    with pytest.raises(Conflict, match=name) as caught:
        RunDirectory.open(path, DUMP)
    assert "finetuning.output_dir" in caught.value.hint
    assert (path / name).read_text() == "precious"
    assert not (path / "config.json").exists()


@pytest.mark.parametrize("content", ["{}", "[1]", "not json", '{"run_id": "x"}'])
def test_config_of_something_else_is_not_overwritten(path: Path, content: str) -> None:
    path.mkdir(parents=True)
    (path / "config.json").write_text(content)
    with pytest.raises(Conflict, match="not the configuration of a run"):
        RunDirectory.open(path, DUMP)
    assert (path / "config.json").read_text() == content


def test_directory_with_unrelated_files_will_do(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "notes.txt").write_text("mine")
    with RunDirectory.open(path, DUMP) as run:
        assert not run.resumed
    assert (path / "notes.txt").read_text() == "mine"


def test_crash_before_the_configuration_was_written_starts_anew(path: Path) -> None:
    path.mkdir(parents=True)
    (path / ".lock").write_text("1234")
    (path / ".config.json.tmp").write_text('{"run_id": "ru')
    with RunDirectory.open(path, DUMP) as run:
        assert not run.resumed
    assert not (path / ".config.json.tmp").exists()


def test_file_in_place_of_the_directory(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("")
    with pytest.raises(InvalidRequest, match="is a file"):
        RunDirectory.open(path, DUMP)


def test_damaged_journal_releases_the_lock(path: Path) -> None:
    with RunDirectory.open(path, DUMP) as run:
        run.journal.append("a", {})
        run.journal.append("b", {})
    journal = path / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(b"x" + whole)
    with pytest.raises(DamagedFile, match="line 1, at byte 0"):
        RunDirectory.open(path, DUMP)
    journal.write_bytes(whole)
    RunDirectory.open(path, DUMP).close()


def test_stores_are_shared_while_open_and_reopened_afterwards(path: Path) -> None:
    with RunDirectory.open(path, DUMP) as run:
        store = run.store("epoch-0000")
        assert run.store("epoch-0000") is store
        assert run.store("validation-0000") is not store
        store.append(Rollout("r", "e", 0, Ending.COMPLETED, 1.0))
        store.close()
        again = run.store("epoch-0000")
        assert again is not store
        assert [e.rollout_id for e in again.rollouts()] == ["r"]
    assert again.closed
    assert (path / "trajectories" / "epoch-0000.jsonl").exists()


@pytest.mark.parametrize("name", ["", "../journal", "a/b", ".hidden", "Epoch"])
def test_store_names_stay_in_their_directory(path: Path, name: str) -> None:
    with RunDirectory.open(path, DUMP) as run, pytest.raises(InvalidRequest):
        run.store(name)


def test_write_atomic_replaces_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file.json"
    write_atomic(target, b"old")
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), fsync(fd))[1])
    write_atomic(target, b"new")
    assert target.read_bytes() == b"new"
    assert len(synced) == 2, "the file before the rename, its directory after it"
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]

    def fail(fd: int) -> None:
        raise OSError("no power")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no power"):
        write_atomic(target, b"newer")
    assert target.read_bytes() == b"new"


def test_rollouts_ahead_are_results_until_a_step_has_them(path: Path) -> None:
    slots = [Slot(0, 12), Slot(1, 3)]
    with RunDirectory.open(path, DUMP) as directory:
        for slot in slots:
            with directory.ahead.open(slot) as store:
                store.append(Rollout("r", "e", 0, Ending.COMPLETED, 1.0, index=slot.index))
        assert directory.ahead.found() == slots
    with pytest.raises(Conflict, match="another configuration"):
        RunDirectory.open(path, OTHER)
    with RunDirectory.open(path, DUMP) as directory:
        directory.ahead.remove([*slots, Slot(7, 7)])
        assert directory.ahead.found() == []
        assert not list((path / "ahead").iterdir())
    RunDirectory.open(path, OTHER).close()
