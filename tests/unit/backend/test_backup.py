"""Backups: consistent under writers, rejected when interrupted or damaged, restored to a state that opens."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from insitu.backend.backup import backup as backup_module
from insitu.backend.backup.backup import backup_state
from insitu.backend.backup.restore import restore_state
from insitu.backend.ledger import Ledger, ledger_url
from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.backend.state_disk import RESTORING, check_whole
from insitu.cli import cli
from insitu.errors import Conflict, InsituError, InvalidRequest, NotFound
from insitu.gateway.recording.journal import Journal, journal_folder, recover
from insitu.records.store import RecordStore
from insitu.system.processes import lock_directory
from insitu.types import JobState, LoraSettings, ModelCall, StepSettings, Trajectory, TrajectoryGroup

RUN = "run"


def call(call_id: str) -> ModelCall:
    return ModelCall(
        id=call_id,
        rollout_id=f"rollout-{call_id}",
        model=RUN,
        run=RUN,
        policy_step=0,
        policy_version=f"{RUN}@0",
        prompt_ids=[1, 2, 3],
        output_ids=[4, 5],
        logprobs=[-0.5, -1.25],
        finish_reason="stop",
        messages=[{"role": "user", "content": "hi"}],
        answer={"role": "assistant", "content": "ho"},
        sampling={"temperature": 1.0},
        timings={"total": 0.5},
        started_at=12.5,
        function="planner",
        protocol="messages",
    )


class Backend:
    """The storage of a backend, written in the order in which a backend writes."""

    def __init__(self, state_dir: Path) -> None:
        self.dir = state_dir
        state_dir.mkdir(mode=0o700, exist_ok=True)
        self.ledger = Ledger(ledger_url(state_dir))
        self.records = RecordStore(f"sqlite:///{state_dir / 'calls.db'}")
        self.ledger.register_run("project", RUN, "model", LoraSettings(), {}, {})

    def step(self, step: int, keep: int = 2) -> None:
        """Record calls, upload a group, train a step, prune: as `insitu serve` does."""
        ids = [f"call-{step}-{n}" for n in range(3)]
        self.records.append([call(call_id) for call_id in ids])
        group = TrajectoryGroup(f"g{step}", RUN, [Trajectory(f"r{step}", ids, 1.0)])
        self.ledger.put_group(group, f"hash-{step}")
        job = self.ledger.create_job(RUN, f"key-{step}", [group.id], StepSettings(), f"request-{step}")
        self.ledger.transition_job(job.id, JobState.RUNNING)
        staging = checkpoints.stage(self.dir / "runs", RUN, step)
        (staging / "adapter").mkdir()
        (staging / "adapter" / "adapter_model.safetensors").write_bytes(os.urandom(20_000))
        (staging / "state.json").write_text(json.dumps({"step": step}))
        sha256 = checkpoints.commit(staging)
        path = checkpoints.checkpoint_path(self.dir / "runs" / RUN, step)
        self.ledger.commit_step(job.id, step, {"reward/mean": 1.0}, str(path), sha256)
        for old in self.ledger.prune_checkpoints(RUN, keep):
            checkpoints.remove(self.dir / "runs" / RUN, old)

    def close(self) -> None:
        self.ledger.close()
        self.records.close()


@pytest.fixture
def backend(tmp_path: Path):
    opened = Backend(tmp_path / "state")
    for step in (1, 2, 3):
        opened.step(step)
    (opened.dir / "keys.json").write_text('{"version": 1, "keys": []}')
    (opened.dir / "audit.jsonl").write_text('{"at":"now"}\n')
    (opened.dir / "ray.token").write_text("secret")
    (opened.dir / "runs" / RUN / "probe.json").write_text("[[1]]")
    adapter = opened.dir / "adapters" / ("a" * 64) / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    yield opened
    opened.close()


def check_consistent(state_dir: Path) -> int:
    """Everything that the ledger names is there; return its last step."""
    with Ledger(ledger_url(state_dir)) as ledger:
        last = ledger.get_run(RUN).step
        assert [step.step for step in ledger.steps(RUN)] == list(range(1, last + 1))
        for kept in ledger.checkpoints(RUN):
            checkpoints.verify(
                checkpoints.checkpoint_path(state_dir / "runs" / RUN, kept.step), kept.manifest_sha256
            )
        assert ledger.checkpoints(RUN)[-1].step == last
        named = set(ledger.calls_in_use(RUN, -1))
    records = RecordStore(f"sqlite:///{state_dir / 'calls.db'}")
    assert named
    assert records.exists(sorted(named)) == named
    records.close()
    return last


def test_a_backup_is_restored_to_a_state_that_opens(backend: Backend, tmp_path: Path) -> None:
    made = backup_state(backend.dir, tmp_path / "backup")
    assert made.missing == []
    backend.step(4)
    restored = tmp_path / "restored"
    assert restore_state(tmp_path / "backup", restored) == made
    assert check_consistent(restored) == 3
    for name in ("keys.json", "audit.jsonl", f"runs/{RUN}/probe.json"):
        assert (restored / name).read_bytes() == (backend.dir / name).read_bytes()
    assert (restored / "adapters" / ("a" * 64) / "adapter" / "adapter_config.json").is_file()
    assert not (restored / "ray.token").exists(), "a token of a running cluster is no state"
    assert not (restored / RESTORING).exists()
    check_whole(restored)


def test_only_the_owner_can_read_a_backup_and_what_is_restored(backend: Backend, tmp_path: Path) -> None:
    (tmp_path / "backup").mkdir(mode=0o755)
    backend.dir.joinpath("keys.json").chmod(0o644)
    before = os.umask(0o000)
    try:
        backup_state(backend.dir, tmp_path / "backup")
        restore_state(tmp_path / "backup", tmp_path / "restored")
    finally:
        os.umask(before)
    places = (tmp_path / "backup", tmp_path / "restored")
    for path in (*places, *(path for place in places for path in place.rglob("*"))):
        if path.name == "lock":  # empty
            continue
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_the_manifest_has_the_size_and_hash_of_every_file(backend: Backend, tmp_path: Path) -> None:
    backup_state(backend.dir, tmp_path / "backup")
    manifest = json.loads((tmp_path / "backup" / "manifest.json").read_text())
    assert manifest["insitu"]
    files = {path for path in (tmp_path / "backup").rglob("*") if path.is_file()}
    assert {tmp_path / "backup" / name for name in manifest["files"]} == files - {
        tmp_path / "backup" / "manifest.json"
    }
    for name, entry in manifest["files"].items():
        content = (tmp_path / "backup" / name).read_bytes()
        assert entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_backups_under_a_writer_have_every_step_acknowledged_before_and_all_it_names(
    backend: Backend, tmp_path: Path
) -> None:
    acknowledged = 3
    ending = threading.Event()
    failures: list[BaseException] = []

    def train() -> None:
        nonlocal acknowledged
        try:
            while not ending.is_set():
                backend.step(acknowledged + 1)
                acknowledged += 1
        except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
            failures.append(error)

    def infer() -> None:
        number = 0
        try:
            while not ending.is_set():
                backend.records.append([call(f"other-{number}")])
                number += 1
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=train), threading.Thread(target=infer)]
    for thread in threads:
        thread.start()
    try:
        for attempt in range(4):
            before = acknowledged
            made = backup_state(backend.dir, tmp_path / f"b{attempt}")
            assert made.missing == []
            restore_state(tmp_path / f"b{attempt}", tmp_path / f"r{attempt}")
            assert check_consistent(tmp_path / f"r{attempt}") >= before
    finally:
        ending.set()
        for thread in threads:
            thread.join(30)
    assert failures == []
    assert acknowledged > 3, "the writer was at work"


def test_a_checkpoint_pruned_between_ledger_and_copy_leads_to_a_newer_ledger(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_directory = backup_module._copy_directory
    steps = iter((4, 5))

    def prune_after(source: Path, copy: Path, sha256: str | None) -> str | None:
        failed = copy_directory(source, copy, sha256)
        for step in steps:  # once step 2 is copied, so that its copy is of no use
            backend.step(step)
        return failed

    monkeypatch.setattr(backup_module, "_copy_directory", prune_after)
    assert backup_state(backend.dir, tmp_path / "backup").missing == []
    restore_state(tmp_path / "backup", tmp_path / "restored")
    assert check_consistent(tmp_path / "restored") == 5
    kept = sorted(path.name for path in (tmp_path / "backup/runs" / RUN / "checkpoints").iterdir())
    assert kept == ["000004", "000005"]


def test_calls_are_copied_after_the_ledger(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    copy = backup_module.copy_database

    def watched(source: Path, target: Path) -> None:
        copied.append(source.name)
        copy(source, target)

    monkeypatch.setattr(backup_module, "copy_database", watched)
    backup_state(backend.dir, tmp_path / "backup")
    assert copied == ["ledger.db", "calls.db"]


def test_calls_that_were_answered_and_are_in_the_journal_are_in_the_backup(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = journal_folder(f"sqlite:///{backend.dir / 'calls.db'}")
    assert folder is not None
    journal = Journal(folder)
    journal.add(call("answered"), 1)
    journal.add(call("moved"), 2)
    copy = backup_module.copy_database

    def move_before(source: Path, target: Path) -> None:
        if source.name == "calls.db":  # what the gateway does at any time
            backend.records.append([call("moved")])
            journal.close(everything_is_written=True)
        copy(source, target)

    monkeypatch.setattr(backup_module, "copy_database", move_before)
    backup_state(backend.dir, tmp_path / "backup")
    restore_state(tmp_path / "backup", tmp_path / "restored")
    url = f"sqlite:///{tmp_path / 'restored' / 'calls.db'}"
    records = RecordStore(url)
    restored = journal_folder(url)
    assert restored is not None
    recover(restored, records)
    assert records.get(["answered", "moved"]) == [call("answered"), call("moved")]
    records.close()


def test_a_damaged_checkpoint_is_named_as_missing_and_the_rest_is_restored(
    backend: Backend, tmp_path: Path
) -> None:
    damaged = checkpoints.checkpoint_path(backend.dir / "runs" / RUN, 3) / "state.json"
    damaged.write_text("other")
    result = CliRunner().invoke(
        cli, ["backup", str(tmp_path / "backup"), "--state-dir", str(backend.dir)], catch_exceptions=False
    )
    assert result.exit_code == 0
    assert f"runs/{RUN}/checkpoints/000003" in result.stderr
    assert "state.json has 5 bytes" in result.stderr
    result = CliRunner().invoke(
        cli,
        ["restore", str(tmp_path / "backup"), "--state-dir", str(tmp_path / "restored")],
        catch_exceptions=False,
    )
    assert f"without runs/{RUN}/checkpoints/000003" in result.stderr
    with Ledger(ledger_url(tmp_path / "restored")) as ledger:
        assert ledger.get_run(RUN).step == 3
    assert (tmp_path / "restored/runs" / RUN / "checkpoints/000002").is_dir()


def test_a_half_written_line_of_the_audit_log_is_left_out(backend: Backend, tmp_path: Path) -> None:
    with (backend.dir / "audit.jsonl").open("a") as log:
        log.write('{"at":"la')
    backup_state(backend.dir, tmp_path / "backup")
    assert (tmp_path / "backup" / "audit.jsonl").read_text() == '{"at":"now"}\n'


def test_with_the_databases_on_a_server_the_files_are_copied_and_pg_dump_is_named(
    backend: Backend, tmp_path: Path
) -> None:
    backend.close()
    for name in ("ledger.db", "calls.db"):
        (backend.dir / name).unlink()
    (backend.dir / "database.id").write_text("7")
    checkpoints.stage(backend.dir / "runs", RUN, 4)  # one that is being written
    state = ["--state-dir", str(backend.dir)]
    result = CliRunner().invoke(cli, ["backup", str(tmp_path / "backup"), *state], catch_exceptions=False)
    assert result.stderr.count("pg_dump") == 2
    restored = tmp_path / "restored"
    restore_state(tmp_path / "backup", restored)
    assert (restored / "database.id").read_text() == "7"
    kept = sorted((restored / "runs" / RUN / "checkpoints").iterdir())
    assert [checkpoints.verify(path)["step"] for path in kept] == [2, 3]
    assert (restored / "adapters" / ("a" * 64) / "adapter" / "adapter_config.json").is_file()
    check_whole(restored)


# Interrupted


@pytest.mark.parametrize("after", ["ledger", "all"])
def test_a_backup_killed_in_the_middle_is_rejected(after: str, backend: Backend, tmp_path: Path) -> None:
    names = {"ledger": "_named", "all": "write_manifest"}
    program = (
        "import sys, time; from pathlib import Path; from insitu.backend.backup import backup\n"
        "def stop(*_):\n    print('there', flush=True); time.sleep(60)\n"
        f"backup.{names[after]} = stop\n"
        "backup.backup_state(Path(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    target = tmp_path / "backup"
    command = [sys.executable, "-c", program, str(backend.dir), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.send_signal(signal.SIGKILL)
    assert (target / "ledger.db").is_file()
    with pytest.raises(NotFound, match="interrupted"):
        restore_state(target, tmp_path / "restored")
    assert not (tmp_path / "restored").exists()
    with pytest.raises(Conflict, match="not an empty directory"):
        backup_state(backend.dir, target)


def test_a_restore_that_ends_in_the_middle_is_rejected_by_serve_and_restore(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup_state(backend.dir, tmp_path / "backup")
    restored = tmp_path / "restored"
    with monkeypatch.context() as patched:
        patched.setattr("insitu.backend.backup.restore._check_state", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            restore_state(tmp_path / "backup", restored)

    with pytest.raises(Conflict, match="did not finish"):
        restore_state(tmp_path / "backup", restored)

    class Settings:
        state_dir = restored

        def check(self) -> None:
            pass

    pytest.importorskip("ray")
    from insitu.backend.serve import serve

    before = os.umask(0o077)
    try:
        with pytest.raises(Conflict, match="did not finish"):
            serve(Settings(), print)  # pyright: ignore[reportArgumentType]
    finally:
        os.umask(before)


# Rejected


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_a_damaged_file_is_named_and_nothing_is_written(backend: Backend, tmp_path: Path) -> None:
    backup_state(backend.dir, tmp_path / "backup")
    checkpoint = f"runs/{RUN}/checkpoints/000003"
    for name in ("ledger.db", "calls.db", "keys.json", "audit.jsonl", f"{checkpoint}/manifest.json"):
        path = tmp_path / "backup" / name
        whole = path.read_bytes()
        for damage in (_flip, _truncate, Path.unlink):
            damage(path)
            with pytest.raises(InvalidRequest, match=re.escape(name)):
                restore_state(tmp_path / "backup", tmp_path / "restored")
            assert not (tmp_path / "restored").exists()
            path.write_bytes(whole)
    restore_state(tmp_path / "backup", tmp_path / "restored")


def test_extra_files_links_and_names_outside_are_rejected(backend: Backend, tmp_path: Path) -> None:
    target = tmp_path / "backup"
    backup_state(backend.dir, target)
    (target / "extra").write_text("x")
    with pytest.raises(InvalidRequest, match="extra is not in the manifest"):
        restore_state(target, tmp_path / "restored")
    (target / "extra").unlink()
    content = (target / "keys.json").read_bytes()
    (tmp_path / "outside").write_bytes(content)
    (target / "keys.json").unlink()
    (target / "keys.json").symlink_to(tmp_path / "outside")
    with pytest.raises(InvalidRequest, match=r"keys\.json is neither"):
        restore_state(target, tmp_path / "restored")
    (target / "keys.json").unlink()
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["files"]["../outside"] = manifest["files"].pop("keys.json")
    (target / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InvalidRequest, match=r"\.\./outside is missing"):
        restore_state(target, tmp_path / "restored")
    assert not (tmp_path / "restored").exists()


def test_a_ledger_that_names_more_than_the_backup_has_is_rejected(backend: Backend, tmp_path: Path) -> None:
    target = tmp_path / "backup"
    backup_state(backend.dir, target)
    manifest = json.loads((target / "manifest.json").read_text())
    lost = f"runs/{RUN}/checkpoints/000003"
    shutil.rmtree(target / lost)
    manifest["files"] = {name: e for name, e in manifest["files"].items() if not name.startswith(lost)}
    (target / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InsituError, match="000003"):
        restore_state(target, tmp_path / "restored")
    with pytest.raises(Conflict, match="did not finish"):
        check_whole(tmp_path / "restored")


def test_a_state_directory_in_use_or_with_content_is_left_alone(backend: Backend, tmp_path: Path) -> None:
    backup_state(backend.dir, tmp_path / "backup")
    used = tmp_path / "used"
    used.mkdir()
    lock = lock_directory(used)
    (used / "ledger.db").write_text("theirs")
    with pytest.raises(Conflict, match="another `insitu serve`"):
        restore_state(tmp_path / "backup", used)
    (used / "ledger.db").unlink()
    with pytest.raises(Conflict, match="another `insitu serve`"):
        restore_state(tmp_path / "backup", used)
    lock.close()
    (used / "ledger.db").write_text("theirs")
    with pytest.raises(Conflict, match=r"not empty: it holds ledger\.db"):
        restore_state(tmp_path / "backup", used)
    assert (used / "ledger.db").read_text() == "theirs"


def test_a_backend_does_not_start_during_a_restore(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup_state(backend.dir, tmp_path / "backup")
    seen: list[bool] = []

    def during(state_dir: Path, _manifest: object) -> None:
        with pytest.raises(Conflict, match="another `insitu serve`"):
            lock_directory(state_dir)
        seen.append(True)

    monkeypatch.setattr("insitu.backend.backup.restore._check_state", during)
    restore_state(tmp_path / "backup", tmp_path / "restored")
    assert seen == [True]


def test_places_that_cannot_hold_a_backup_are_rejected(backend: Backend, tmp_path: Path) -> None:
    with pytest.raises(Conflict, match="would be lost with it"):
        backup_state(backend.dir, backend.dir / "backup")
    with pytest.raises(NotFound, match=r"no ledger\.db"):
        backup_state(tmp_path / "nothing", tmp_path / "backup")
    assert not (tmp_path / "backup").exists()
