"""Runs share the trainer's memory: the one that was not used for longest goes, and comes back bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from insitu.backend.fleet.trainer_rank import TrainerRank, runs_bytes
from insitu.types import LoraSettings, StepSettings, TrainingSequence
from tests.support.sequences import train
from tests.unit.training.test_trainer_rank import adapter_of, equal

Make = Callable[..., list[TrainingSequence]]
SETTINGS = StepSettings(learning_rate=1e-2)
LORAS = {f"run-{rank}": LoraSettings(rank=rank, seed=rank) for rank in (4, 8, 16, 32)}


def open_runs(trainer: TrainerRank) -> list[str]:
    return list(trainer.info()["runs"])


def test_the_run_that_was_not_used_for_longest_goes(trainer: TrainerRank) -> None:
    for run, lora in LORAS.items():
        trainer.open_run(run, lora)
    assert trainer.make_room("run-32") == [], "a gigabyte is enough for all of them"
    trainer.score("run-4", [[1, 2, 3]])
    sizes = {run: learner.num_bytes for run, learner in trainer._learners.items()}
    assert sizes["run-32"] == 2 * sizes["run-16"] == 8 * sizes["run-4"]
    trainer._runs_bytes = sum(sizes.values()) - 1
    assert trainer.make_room("run-32") == ["run-8"], "run-4 is smaller and older, but was used since"
    trainer._runs_bytes = 1
    assert trainer.make_room("run-32") == ["run-16", "run-4"], "the run that needs the room stays"
    assert open_runs(trainer) == ["run-32"]


def test_a_gpu_holds_the_one_run_of_its_plan(trainer: TrainerRank) -> None:
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert (runs_bytes(cpu, 2**30), runs_bytes(cpu, 2**40)) == (2**30, 2**37)
    trainer._runs_bytes = runs_bytes(cuda, 2**40)
    for run, lora in LORAS.items():
        trainer.open_run(run, lora)
    assert trainer.make_room("run-8") == ["run-4", "run-16", "run-32"]


def test_the_memory_counts_what_an_update_creates(trainer: TrainerRank, make_sequences: Make) -> None:
    trainer.open_run("run", LoraSettings())
    before = trainer._learners["run"].num_bytes
    train(trainer, "run", make_sequences(4), SETTINGS)
    learner = trainer._learners["run"]
    moments = [
        value for state in learner.optimizer.state.values() for name, value in state.items() if name != "step"
    ]
    tensors = [*learner.parameters.values(), *moments]
    assert before == learner.num_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("room", [True, False])
def test_each_run_learns_as_it_does_alone(
    room: bool, trainer: TrainerRank, make_sequences: Make, tmp_path: Path
) -> None:
    steps = range(3)
    alone = {}
    for run, lora in LORAS.items():
        trainer.open_run(run, lora)
        for step in steps:
            train(trainer, run, make_sequences(4, step), SETTINGS)
        alone[run] = adapter_of(trainer, run, tmp_path / "alone" / run)
        trainer.close_run(run)
    if not room:
        trainer._runs_bytes = 1
    num_closed = 0
    for step in steps:
        for run, lora in LORAS.items():
            if run not in open_runs(trainer):
                trainer.open_run(run, lora, str(tmp_path / run / str(step)) if step else None)
            num_closed += len(trainer.make_room(run))
            train(trainer, run, make_sequences(4, step), SETTINGS)
            trainer.save(run, str(tmp_path / run / str(step + 1)))
    assert num_closed == (0 if room else len(LORAS) * len(steps) - 1)
    for run, adapter in alone.items():
        if run not in open_runs(trainer):
            trainer.open_run(run, LORAS[run], str(tmp_path / run / "3"))
        assert equal(adapter, adapter_of(trainer, run, tmp_path / "shared" / run))
