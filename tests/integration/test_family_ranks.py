"""Two trainer ranks (FSDP2, gloo) learn what one learns, in a family of each kind that ranks can share."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.types import LoraSettings, StepSettings, TrainingSequence
from tests.gates.families.trainer_side import save_tiny
from tests.support.sequences import make_sequence, train

pytestmark = pytest.mark.timeout(300)

ADAPTER = "adapter/adapter_model.safetensors"
EXACT = 1e-6
NEARLY = 5e-6
"""AdamW divides a gradient by its own size, which makes the rounding of a small one as large as a step's."""
VOCABULARY = 150


def sequences(step: int) -> list[TrainingSequence]:
    rng = random.Random(step)
    made: list[TrainingSequence] = []
    for index in range(5):
        num_prompt, num_output = rng.randint(2, 20), rng.randint(2, 12)
        ids = [rng.randrange(3, VOCABULARY) for _ in range(num_prompt + num_output)]
        mask = [0] * num_prompt + [1] * num_output
        logprobs = [0.0] * num_prompt + [-5.0 + rng.random() for _ in range(num_output)]
        made.append(make_sequence(f"rollout-{index}", ids, mask, logprobs, rng.choice([-1.2, 0.7])))
    return made


def rank(number: int, world_size: int, port: int, model: str, out: str) -> None:
    """Train two steps and save the adapter."""
    torch.use_deterministic_algorithms(True)
    trainer = TrainerRank(number, world_size, "127.0.0.1", port, model, "float32", 1, "cpu", 64, True)
    if world_size > 1:
        frozen = list(trainer._policy.model.parameters())
        assert all(isinstance(p, DTensor) and p.to_local().numel() <= p.numel() for p in frozen)
        assert sum(p.to_local().numel() for p in frozen) < 0.6 * sum(p.numel() for p in frozen)
    trainer.open_run("run", LoraSettings(rank=4, seed=3))
    for step in range(2):
        assert train(trainer, "run", sequences(step), StepSettings(learning_rate=1e-3))["updated"] == 1
    trainer.save("run", f"{out}/{world_size}")
    if world_size > 1:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("gpt_oss", id="experts"),
        pytest.param("lfm2", id="hybrid"),
        pytest.param("qwen3_5", id="wrapper", marks=pytest.mark.sweep),
        pytest.param("falcon_h1", id="mamba", marks=pytest.mark.sweep),
        pytest.param("gemma3_text", id="windows", marks=pytest.mark.sweep),
        pytest.param("qwen3", id="dense", marks=pytest.mark.sweep),
    ],
)
def test_two_ranks_give_the_adapter_of_one(family: str, tmp_path: Path) -> None:
    model = save_tiny(family, tmp_path / "model")
    for world_size in (1, 2):
        (tmp_path / str(world_size)).mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        arguments = (world_size, port, str(model), str(tmp_path))
        mp.start_processes(rank, arguments, nprocs=world_size, start_method="spawn")
    adapter, gradients = (difference(tmp_path, file) for file in (ADAPTER, "optimizer.safetensors"))
    moved = max(
        tensor.abs().max().item()
        for name, tensor in load_file(tmp_path / "2" / ADAPTER).items()
        if "lora_B" in name
    )
    print(f"{family}: moments differ by {gradients:.2e}, adapters by {adapter:.2e} of {moved:.2e}")
    assert moved > 1e-3
    assert gradients <= EXACT
    assert adapter <= NEARLY


def difference(folder: Path, file: str) -> float:
    """Return the most by which the file of two ranks differs from that of one."""
    one, two = (load_file(folder / str(count) / file) for count in (1, 2))
    assert one.keys() == two.keys()
    return max((one[name] - two[name]).abs().max().item() for name in one)
