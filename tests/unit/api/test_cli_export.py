"""`insitu export` against a real server: the adapter as PEFT writes it, its digests checked, with a card."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from insitu.backend.ledger import Ledger, checkpoint_files
from insitu.cli import cli
from insitu.errors import CannotHonour, Conflict, CorruptCheckpoint, InvalidRequest, NotFound
from insitu.types import JobState, StepSettings, Trajectory, TrajectoryGroup
from insitu.wire.starts.adapter_upload import read_adapter
from tests.support.peft_directory import write_peft

from .conftest import KEY

FILES = ["README.md", "adapter_config.json", "adapter_model.safetensors"]


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_API_KEY", KEY)


def commit(ledger: Ledger, state_dir: Path, step: int, adapter: Path) -> Path:
    """Commit a step of the run whose checkpoint holds this adapter; return the checkpoint."""
    name = f"g{step}"
    ledger.put_group(TrajectoryGroup(name, "run", [Trajectory(name, ["c"], 1.0)]), "h")
    job = ledger.create_job("run", name, [name], StepSettings(), "h")
    ledger.transition_job(job.id, JobState.RUNNING)
    staging = checkpoint_files.stage(state_dir / "runs", "run", step)
    (staging / "adapter").mkdir()
    for path in adapter.iterdir():
        (staging / "adapter" / path.name).write_bytes(path.read_bytes())
    (staging / "optimizer.safetensors").write_bytes(b"stays here")
    digest = checkpoint_files.commit(staging)
    path = checkpoint_files.checkpoint_path(state_dir / "runs" / "run", step)
    ledger.commit_step(job.id, step, {"reward/mean": 0.25 * step}, str(path), digest)
    return path


@pytest.fixture
def checkpoint(ledger: Ledger, tmp_path: Path) -> Path:
    """The second of two steps."""
    commit(ledger, tmp_path, 1, write_peft(tmp_path / "first"))
    return commit(ledger, tmp_path, 2, write_peft(tmp_path / "made", base_model_name_or_path="org/base"))


async def insitu(server: str, *words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, cli, ["export", *words, "--url", server])


async def test_the_adapter_arrives_as_it_was_written(server: str, checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "my exports" / "adapter"
    told = await insitu(server, "run", str(target))
    assert told.exit_code == 0, told.exception
    assert sorted(path.name for path in target.iterdir()) == FILES
    for name in FILES[1:]:
        assert (target / name).read_bytes() == (checkpoint / "adapter" / name).read_bytes()
    assert read_adapter(target).rank == 2, "another run can start from it"
    first, _, command = told.stdout.splitlines()
    assert first.startswith("run@2: adapter, 0.0 MiB in ")
    assert shlex.split(command) == [
        *("python", "-m", "vllm.entrypoints.openai.api_server", "--model", "org/base"),
        *("--enable-lora", "--lora-modules", f"run={target}", "--generation-config", "vllm"),
    ]
    assert [path.name for path in target.parent.iterdir()] == ["adapter"], "no scratch directory is left"


async def test_the_object_has_the_documented_keys(server: str, checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    told = await insitu(server, "run@1", str(target), "--base-model", "/models/base", "--json")
    shown = json.loads(told.stdout)
    keys = ["run", "step", "kind", "directory", "base_model", "manifest_sha256", "files", "command"]
    assert list(shown) == keys
    assert (shown["run"], shown["step"], shown["kind"]) == ("run", 1, "adapter")
    assert (shown["directory"], shown["base_model"]) == (str(target), "/models/base")
    assert list(shown["files"]) == FILES
    config = json.loads((target / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "/models/base"


@pytest.mark.parametrize("name", ["manifest.json", "adapter/adapter_model.safetensors"])
async def test_a_damaged_file_is_not_exported(
    name: str, server: str, checkpoint: Path, tmp_path: Path
) -> None:
    damaged = checkpoint / name
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    refused = (await insitu(server, "run@2", str(tmp_path / "out"))).exception
    assert isinstance(refused, CorruptCheckpoint)
    assert f"{Path(name).name} of run@2 arrived with the SHA-256" in str(refused)
    assert not list(tmp_path.glob("*out*"))


async def test_what_cannot_be_exported(
    server: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = str(tmp_path / "out")
    refusals: list[tuple[list[str], type[Exception], str]] = [
        (["ran", target], NotFound, "no run 'ran'"),
        (["run@9", target], NotFound, "kept are 1, 2"),
        (["run@0", target], InvalidRequest, "is the base model model itself"),
        (["run", str(checkpoint)], Conflict, "exists already"),
    ]
    for words, kind, text in refusals:
        refused = (await insitu(server, *words)).exception
        assert isinstance(refused, kind), words
        assert text in str(refused)
    told = await insitu(server, "run", target, "--dtype", "float32")
    assert "--dtype is for merged weights" in told.stderr
    monkeypatch.delitem(sys.modules, "insitu.training.model.merge", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    refused = (await insitu(server, "run", target, "--merged")).exception
    assert isinstance(refused, CannotHonour)
    assert refused.hint == (
        "pip install --extra-index-url https://download.pytorch.org/whl/cpu 'insitu[backend-cpu]' "
        "(or 'insitu[backend]' with a GPU); or leave --merged out"
    )
    assert not Path(target).exists()


def output_directory(path: Path, run: str = "run") -> Path:
    """What `insitu finetune` leaves: the configuration, and the history of its validations."""
    entry: dict[str, Any] = {"epoch": 0, "num_examples": 32, "num_failed": 0, "endings": {}, "timestamp": ""}
    gain = {"difference": 0.5, "low": 0.31, "high": 0.69, "confidence": 0.95, "num_examples": 32}
    history = [
        {**entry, "step": 0, "avg_reward": 0.125, "standard_error": 0.05},
        {**entry, "step": 2, "avg_reward": 0.75, "standard_error": 0.06},
        {
            **entry,
            "step": 2,
            "avg_reward": 0.625,
            "standard_error": 0.07,
            "remeasured": True,
            "gain": {**gain, "num_unpaired": 0, "verdict": "better"},
        },
    ]
    config = {
        "eval": {
            "general": {"dataset": {"_type": "json", "file_path": "data/train.json"}},
            "evaluators": {"exact": {"_type": "python", "entry": "reward:score"}},
        },
        "finetuning": {"reward_function": {"name": "exact"}},
        "trainer_adapters": {"backend": {"backend": {"name": run}}},
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"run_id": "run_1", "fingerprint": "", "config": config}))
    (path / "validation_history.json").write_text(json.dumps(history))
    return path


async def test_the_card_says_what_the_weights_are(server: str, checkpoint: Path, tmp_path: Path) -> None:
    output = output_directory(tmp_path / "output")
    words = ["run@2", str(tmp_path / "out"), "--from", str(output), "--license", "apache-2.0"]
    assert (await insitu(server, *words)).exit_code == 0
    card = (tmp_path / "out" / "README.md").read_text()
    lines = card.splitlines()
    assert lines[:5] == [
        "---",
        'base_model: "org/base"',
        'library_name: "peft"',
        'license: "apache-2.0"',
        lines[4],
    ]
    for line in (
        "# run@2",
        "| base model | org/base |",
        "| data | data/train.json |",
        "| reward | exact (reward:score) |",
        "| adapter | rank 8, alpha 16, all linear layers |",
        "| lineage | run@2 < the base model |",
        "| licence of the base model | apache-2.0 |",
        "- Validation reward: 0.6250 ± 0.0700 on 32 examples; before training 0.1250 ± 0.0500 on 32 "
        "examples.",
        "- Gain over the model before training: +0.500, 95 % interval +0.310 to +0.690, 32 examples.",
        "- Of the rollouts that the step was trained on: reward/mean 0.5.",
    ):
        assert line in lines, line
    bare = tmp_path / "bare"
    assert (await insitu(server, "run@1", str(bare))).exit_code == 0
    assert "| licence of the base model | not given |" in (bare / "README.md").read_text()
    assert "| data | not given |" in (bare / "README.md").read_text()


async def test_the_figures_of_another_run_are_refused(server: str, checkpoint: Path, tmp_path: Path) -> None:
    other = output_directory(tmp_path / "output", run="other")
    refused = (await insitu(server, "run", str(tmp_path / "out"), "--from", str(other))).exception
    assert isinstance(refused, InvalidRequest)
    assert "is of run other, not of run" in str(refused)
    refused = (await insitu(server, "run", str(tmp_path / "out"), "--from", str(checkpoint))).exception
    assert isinstance(refused, InvalidRequest)
    assert "config.json is missing or damaged" in str(refused)
