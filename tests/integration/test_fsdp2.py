"""Several trainer ranks (FSDP2, gloo) learn what one rank learns; a resumed run what an unbroken one does."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.testing.models import tiny
from insitu.training.model.export import ADAPTED_FILE
from insitu.types import LoraSettings, StepSettings, TrainingSequence
from tests.support.sequences import altered, make_sequence, train
from tests.support.trees import random_shares

pytestmark = pytest.mark.timeout(300)

_SETTINGS = StepSettings(learning_rate=1e-3, beta=0.02, entropy_bonus=0.001)
_LORA = LoraSettings(rank=8, alpha=16, seed=3)


def _sequences(step: int, count: int) -> list[TrainingSequence]:
    """Rollouts of very different lengths, some on a common prompt: uneven work, branches and fillers."""
    rng = random.Random(step)
    prompt: list[int] = []
    sequences: list[TrainingSequence] = []
    for i in range(count):
        prompt = prompt if i % 3 else [rng.randrange(3, 2000) for _ in range(rng.randint(2, 60))]
        num_prompt, num_output = len(prompt), rng.randint(1, 25)
        ids = prompt + [rng.randrange(3, 2000) for _ in range(num_output)]
        mask = [0] * num_prompt + [1] * num_output
        logprobs = [0.0] * num_prompt + [-10.8 + rng.random() for _ in range(num_output)]
        sequences.append(make_sequence(f"rollout-{i}", ids, mask, logprobs, rng.choice([-1.2, 0.0, 0.7])))
    return sequences


def _trees(step: int) -> list[TrainingSequence]:
    """Rollouts of several turns with prefix breaks and coinciding samples."""
    return [share.sequence for share in random_shares(step, 5, vocabulary=2000, longest=60)]


def _rank(
    rank: int, world_size: int, port: int, out: str, budget: int, checkpoint_layers: bool, model: str
) -> None:
    """Train three steps, then write adapter, merged weights and scores from rank 0."""
    torch.use_deterministic_algorithms(True)
    trainer = TrainerRank(
        rank, world_size, "127.0.0.1", port, model, "float32", 1, "cpu", budget, checkpoint_layers
    )
    if world_size > 1:  # each rank holds its part of every frozen tensor, not a copy of the model
        frozen = list(trainer._policy.model.parameters())
        assert all(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in frozen)
    trainer.open_run("other", LoraSettings(rank=4))
    trainer.open_run("run", _LORA)
    for step in range(3):
        metrics = train(trainer, "run", _sequences(step, 9) + _trees(step), _SETTINGS)
        train(trainer, "other", _sequences(100 + step, 3), _SETTINGS)
        assert metrics["updated"] == 1
        if rank == 0:
            print(world_size, budget, step, metrics["loss"], metrics["num_computed_tokens"], flush=True)
            assert metrics["num_computed_tokens"] < 0.8 * metrics["num_input_tokens"]
    trainer.save("run", out)
    trainer.export_merged("run", f"{out}/merged", "float32")
    scores = trainer.score("run", [s.token_ids.tolist() for s in _sequences(7, 5)])
    if rank == 0:
        save_file({str(i): torch.tensor(s) for i, s in enumerate(scores)}, f"{out}/scores.safetensors")
    if world_size > 1:
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _train(
    world_size: int, out: Path, budget: int, checkpoint_layers: bool = False, model: Path | None = None
) -> None:
    out.mkdir()
    arguments = (world_size, _free_port(), str(out), budget, checkpoint_layers, str(model or tiny()))
    mp.start_processes(_rank, arguments, nprocs=world_size, start_method="spawn")


def _largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def test_two_ranks_and_any_packing_give_the_adapter_of_one(tmp_path: Path) -> None:
    one = tmp_path / "one"
    _train(1, one, budget=4096)
    for world_size, budget in ((1, 100), (2, 4096), (2, 100)):
        other = tmp_path / f"{world_size}-{budget}"
        _train(world_size, other, budget)
        _assert_same(one, other)


@pytest.mark.sweep
def test_two_ranks_with_checkpointed_layers_give_the_adapter_of_one(tmp_path: Path) -> None:
    """On a model with a head of its own; the entropy bonus needs the head's weights in the backward pass."""
    model = _untied(tmp_path / "model")
    _train(1, tmp_path / "one", 4096, model=model)
    _train(2, tmp_path / "two", 100, checkpoint_layers=True, model=model)
    _assert_same(tmp_path / "one", tmp_path / "two")


def _untied(directory: Path) -> Path:
    """Return the tiny model with a head that is not its embedding."""
    torch.manual_seed(0)
    config: Any = AutoConfig.from_pretrained(tiny())
    config.tie_word_embeddings = False
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def _assert_same(one: Path, two: Path) -> None:
    adapter = "adapter/adapter_model.safetensors"
    difference = _largest_difference(load_file(one / adapter), load_file(two / adapter))
    moved = max(t.abs().max().item() for name, t in load_file(two / adapter).items() if "lora_B" in name)
    print(f"{two.name}: adapter difference max={difference:.2e} moved={moved:.2e}")
    assert difference <= 1e-5
    assert moved > 1e-3
    for part in ("model-adapted.safetensors", "model-frozen.safetensors"):
        merged = _largest_difference(load_file(one / "merged" / part), load_file(two / "merged" / part))
        assert merged <= 1e-5
    scores = [load_file(out / "scores.safetensors") for out in (one, two)]
    assert _largest_difference(*scores) <= 1e-4


def _rank_of_methods(rank: int, world_size: int, port: int, out: str, budget: int) -> None:
    """One step of each method beside grpo; three sequences leave a rank without work in between."""
    trainer = TrainerRank(rank, world_size, "127.0.0.1", port, str(tiny()), "float32", 1, "cpu", budget)
    trainer.open_run("teacher", LoraSettings(rank=4, seed=1))
    train(trainer, "teacher", _sequences(5, 6), _SETTINGS)
    trainer.save("teacher", f"{out}/teacher")
    trainer.open_run("run", _LORA)
    train(trainer, "run", _sequences(0, 9), _SETTINGS)  # no longer the base model
    taught = [altered(s, advantages=[float(m) for m in s.mask]) for s in _sequences(1, 3)]
    scored = [replace(s, teacher_t=s.logprobs[s.mask]) for s in taught]
    sides = [[(-1.0 if i == 2 else 1.0) * m for m in s.mask] for i, s in enumerate(taught)]
    pairs = [
        replace(altered(s, advantages=side), rollout_id="bad" if i == 2 else "good")
        for i, (s, side) in enumerate(zip(taught, sides, strict=True))
    ]
    figures: dict[str, float] = {}
    for method, sequences, reference in (
        ("sft", taught, None),
        ("dpo", pairs, None),
        ("dpo", pairs, "teacher"),
        ("distill teacher@1", taught, "teacher"),
        ("distill elsewhere", scored, None),
    ):
        name, _, teacher = method.partition(" ")
        settings = StepSettings(1e-3, method=name, teacher=teacher or None, num_passes=2)  # type: ignore[arg-type]
        directory = f"{out}/teacher" if reference else None
        metrics = train(trainer, "run", sequences, settings, directory)
        figures |= {f"{method} {reference} {each}": metrics[each] for each in ("loss", "grad_norm")}
    trainer.save("run", out)
    if rank == 0:
        save_file({n: torch.tensor(v) for n, v in figures.items()}, f"{out}/figures.safetensors")
    if world_size > 1:
        dist.destroy_process_group()


@pytest.mark.sweep
def test_two_ranks_learn_by_every_method_what_one_learns(tmp_path: Path) -> None:
    for world_size, budget in ((1, 4096), (2, 40)):
        out = tmp_path / str(world_size)
        out.mkdir()
        arguments = (world_size, _free_port(), str(out), budget)
        mp.start_processes(_rank_of_methods, arguments, nprocs=world_size, start_method="spawn")
    one, two = (load_file(tmp_path / str(n) / "figures.safetensors") for n in (1, 2))
    assert {name: two[name].item() for name in two} == pytest.approx(
        {name: one[name].item() for name in one}, rel=1e-4
    )
    adapters = [load_file(tmp_path / str(n) / "adapter" / "adapter_model.safetensors") for n in (1, 2)]
    assert _largest_difference(*adapters) <= 1e-5


def _rank_bfloat16(rank: int, world_size: int, port: int, out: str) -> None:
    trainer = TrainerRank(rank, world_size, "127.0.0.1", port, str(tiny()), "bfloat16", 1, "cpu", 160)
    trainer.open_run("run", _LORA)
    metrics = train(trainer, "run", _sequences(0, 9), _SETTINGS)
    if rank == 0:
        save_file({n: torch.tensor(v) for n, v in metrics.items()}, f"{out}/{world_size}.safetensors")
    if world_size == 1:
        trainer.save("run", f"{out}/saved")
    trainer.open_run("run", _LORA, f"{out}/saved")
    trainer.export_merged("run", f"{out}/merged-{world_size}", "bfloat16")
    if world_size > 1:
        dist.destroy_process_group()


@pytest.mark.sweep
def test_two_ranks_in_bfloat16_agree_with_one(tmp_path: Path) -> None:
    for world_size in (1, 2):
        arguments = (world_size, _free_port(), str(tmp_path))
        mp.start_processes(_rank_bfloat16, arguments, nprocs=world_size, start_method="spawn")
    one, two = (load_file(tmp_path / f"{n}.safetensors") for n in (1, 2))
    for name in ("loss", "grad_norm", "mismatch/mean_abs", "entropy"):
        assert two[name].item() == pytest.approx(one[name].item(), rel=2e-2), name
    assert one["num_tokens"] == two["num_tokens"]
    merged = [(tmp_path / f"merged-{n}" / ADAPTED_FILE).read_bytes() for n in (1, 2)]
    assert merged[0] == merged[1], "the same step has other bytes when two ranks export it"


def _rank_that_loses_its_peer(rank: int, port: int, out: str) -> None:
    trainer = TrainerRank(rank, 2, "127.0.0.1", port, str(tiny()), "float32", 1, "cpu", 160)
    trainer.open_run("run", _LORA)
    train(trainer, "run", _sequences(0, 4), _SETTINGS)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        train(trainer, "run", _sequences(1, 4), _SETTINGS)
    except RuntimeError:
        Path(out).write_text(str(time.monotonic() - started))


def test_a_rank_whose_peer_is_killed_raises_instead_of_waiting(tmp_path: Path) -> None:
    port, out = _free_port(), tmp_path / "seconds"
    context = mp.get_context("spawn")
    ranks = [context.Process(target=_rank_that_loses_its_peer, args=(r, port, str(out))) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
        assert process.exitcode is not None, "a rank still waits for one that is dead"
    assert float(out.read_text()) < 30


def test_resume_is_bit_identical(tmp_path: Path) -> None:
    def trainer() -> TrainerRank:
        return TrainerRank(0, 1, "127.0.0.1", 0, str(tiny()), "float32", 1, "cpu", 160)

    def steps(rank: TrainerRank, numbers: range) -> None:
        for step in numbers:
            train(rank, "run", _sequences(step, 6), _SETTINGS)

    unbroken = trainer()
    unbroken.open_run("run", _LORA)
    steps(unbroken, range(2))
    unbroken.save("run", str(tmp_path / "at-2"))
    steps(unbroken, range(2, 4))
    unbroken.save("run", str(tmp_path / "unbroken"))

    resumed = trainer()
    assert resumed.open_run("run", _LORA, str(tmp_path / "at-2")) == 2
    steps(resumed, range(2, 4))
    resumed.save("run", str(tmp_path / "resumed"))
    files = [p.relative_to(tmp_path / "unbroken") for p in (tmp_path / "unbroken").rglob("*") if p.is_file()]
    assert len(files) == 6
    for file in files:
        assert (tmp_path / "unbroken" / file).read_bytes() == (tmp_path / "resumed" / file).read_bytes(), file
