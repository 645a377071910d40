"""A run that starts from a checkpoint: with its weights alone, or with all of it, as training goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.errors import CorruptCheckpoint
from insitu.types import LoraSettings, StepSettings, TrainingSequence
from tests.support.sequences import train

Make = Callable[..., list[TrainingSequence]]
LORA = LoraSettings(rank=4, alpha=16, seed=3)
SETTINGS = StepSettings(learning_rate=1e-2, num_passes=2)


@pytest.fixture
def source(trainer: TrainerRank, make_sequences: Make, tmp_path: Path) -> Path:
    """The checkpoint of a run after two steps."""
    trainer.open_run("source", LORA)
    for seed in range(2):
        train(trainer, "source", make_sequences(6, seed), SETTINGS)
    trainer.save("source", str(tmp_path / "source"))
    return tmp_path / "source"


def digest(trainer: TrainerRank, run: str, directory: Path) -> str:
    trainer.save(run, str(directory / run))
    weights = directory / run / "adapter" / "adapter_model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def rng(directory: Path) -> torch.Tensor:
    return load_file(directory / "rng.safetensors")["cpu"]


def test_a_fork_takes_the_step_that_its_source_takes(
    trainer: TrainerRank, model_dir: Path, make_sequences: Make, source: Path, tmp_path: Path
) -> None:
    other = TrainerRank(0, 1, "127.0.0.1", 0, str(model_dir), "float32", 1, "cpu", 64)
    other.start_run("fork", LORA, str(source), True)
    other.save("fork", str(tmp_path / "start"))
    for name in ("optimizer.safetensors", "optimizer.json", "rng.safetensors", "adapter"):
        for path in [source / name] if (source / name).is_file() else sorted((source / name).iterdir()):
            copied = tmp_path / "start" / path.relative_to(source)
            assert copied.read_bytes() == path.read_bytes(), name
    for rank, run in ((trainer, "source"), (other, "fork")):
        train(rank, run, make_sequences(6, 9), SETTINGS)
    assert digest(trainer, "source", tmp_path / "next") == digest(other, "fork", tmp_path / "next")


def test_a_fork_keeps_the_loss_scale(model_dir: Path, make_sequences: Make, tmp_path: Path) -> None:
    rank = TrainerRank(0, 1, "127.0.0.1", 0, str(model_dir), "float16", 1, "cpu", 64)
    rank.open_run("source", LORA)
    train(rank, "source", make_sequences(6), SETTINGS)
    rank.save("source", str(tmp_path / "source"))
    kept = rank._learners["source"].loss_scale
    rank.start_run("fork", LORA, str(tmp_path / "source"), True)
    rank.start_run("fresh", LORA, str(tmp_path / "source"), False)
    assert rank._learners["fork"].loss_scale == kept
    assert rank._learners["fresh"].loss_scale != kept


def test_a_start_takes_the_weights_alone(
    trainer: TrainerRank, make_sequences: Make, source: Path, tmp_path: Path
) -> None:
    lora = LoraSettings(rank=4, alpha=16, seed=7)
    trainer.start_run("run", lora, str(source), False)
    assert digest(trainer, "run", tmp_path) == digest(trainer, "source", tmp_path)
    assert (tmp_path / "run" / "optimizer.json").read_text() != (source / "optimizer.json").read_text()
    trainer.open_run("fresh", lora)
    trainer.save("fresh", str(tmp_path / "fresh"))
    assert torch.equal(rng(tmp_path / "run"), rng(tmp_path / "fresh")), "the run's own seed"
    # Its step 0 is a checkpoint of its own: a restarted trainer opens the run from it.
    assert trainer.open_run("run", lora, str(tmp_path / "run")) == 0
    train(trainer, "run", make_sequences(6, 9), SETTINGS)
    assert digest(trainer, "run", tmp_path / "next") != digest(trainer, "source", tmp_path / "next")


def test_an_adapter_of_another_shape_leaves_no_run(trainer: TrainerRank, source: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="has shape"):
        trainer.start_run("run", LoraSettings(rank=8, alpha=16), str(source), False)
    with pytest.raises(CorruptCheckpoint, match="has other tensors"):
        trainer.start_run("run", LoraSettings(4, 16, target_modules=["q_proj"]), str(source), False)
    assert "run" not in trainer.info()["runs"]
