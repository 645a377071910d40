"""The trainer leaves its device and comes back: every tensor moves, and no bit changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.training.batching import score_batch
from insitu.training.model.loading import load_policy
from insitu.training.model.lora import AdapterPool
from insitu.training.model.residence import move
from insitu.types import LoraSettings, StepSettings, TrainingSequence
from tests.support.sequences import train

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")
SETTINGS = StepSettings(learning_rate=1e-2)
Make = Callable[..., list[TrainingSequence]]


class StandinTransfer(TorchFunctionMode):
    """Copies every tensor that is sent to a device into new memory; the old memory is spoiled afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self._left: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.to or not any(isinstance(each, torch.device) for each in args[1:]):
            return func(*args, **(kwargs or {}))
        self._left.append(args[0].detach())
        self.num_bytes += args[0].nbytes
        return args[0].detach().clone()

    def spoil(self) -> None:
        for tensor in self._left:
            tensor.fill_(7)


@contextmanager
def on_a_device(rank: TrainerRank) -> Iterator[None]:
    """Let a rank on a CPU believe that it has a device."""
    rank._device = CUDA
    yield
    rank._device = CPU


def saved(rank: TrainerRank, folder: Path) -> dict[str, bytes]:
    rank.save("run", str(folder))
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_nothing_changes_by_leaving_and_coming_back(
    model_dir: Path, make_sequences: Make, tmp_path: Path
) -> None:
    ranks = [TrainerRank(0, 1, "127.0.0.1", 0, str(model_dir), "float32", 1, "cpu", 64) for _ in range(2)]
    staying, moving = ranks
    for rank in ranks:
        rank.open_run("run", LoraSettings(rank=4, seed=1))
        rank.open_run("other", LoraSettings(rank=2, seed=2))
        train(rank, "run", make_sequences(seed=1), SETTINGS)
    parts = [*moving._policy.parameters(), *moving._policy.buffers()]
    moments = [m for p in moving._learners["run"].parameters.values() for m in _moments(moving, p)]
    for leave in (moving.off_device, moving.on_device):
        transfer = StandinTransfer()
        with on_a_device(moving), transfer:
            leave()
        transfer.spoil()  # a tensor that still used the old memory would be wrong from here on
        assert transfer.num_bytes >= sum(t.nbytes for t in [*parts, *moments])
    for rank in ranks:
        train(rank, "run", make_sequences(seed=2), SETTINGS)
    assert saved(staying, tmp_path / "staying") == saved(moving, tmp_path / "moving")
    rows = [sequence.token_ids for sequence in make_sequences(seed=3)]
    assert staying.score("run", rows) == moving.score("run", rows)


def _moments(rank: TrainerRank, parameter: nn.Parameter) -> list[torch.Tensor]:
    state = rank._learners["run"].optimizer.state[parameter]
    return [state["exp_avg"], state["exp_avg_sq"]]


def test_nothing_is_left_behind() -> None:
    """The meta device stands for the other one: it exists everywhere, but keeps no values."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4).requires_grad_(False))
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    move(model, [optimizer], META)
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [state[m] for state in optimizer.state.values() for m in ("exp_avg", "exp_avg_sq")]
    assert {tensor.device for tensor in tensors} == {META}
    assert {state["step"].device for state in optimizer.state.values()} == {CPU}, "AdamW counts on the CPU"


def test_shards_move_and_come_back(model_dir: Path) -> None:
    """FSDP2 over torch's fake process group: this process is one rank of two."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        policy = load_policy(str(model_dir), CPU, torch.float32, mesh)
        adapter = AdapterPool(policy.model).add(LoraSettings(rank=2))
        shards = {name: local(p).clone() for name, p in policy.named_parameters()}
        assert any(isinstance(p, DTensor) for p in policy.parameters())
        with torch.no_grad():
            policy(score_batch([[1, 2, 3]]))  # leaves the last unit gathered
        for _ in range(2):
            with StandinTransfer() as transfer:
                move(policy, [torch.optim.AdamW(adapter.parameters().values())], CUDA)
            transfer.spoil()
            assert transfer.num_bytes
        assert shards.keys() == dict(policy.named_parameters()).keys()
        assert all(torch.equal(local(p), shards[name]) for name, p in policy.named_parameters())
        with torch.no_grad():
            policy(score_batch([[1, 2, 3]]))
    finally:
        dist.destroy_process_group()


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def test_a_rank_on_a_cpu_stays_where_it_is(trainer: TrainerRank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insitu.backend.fleet.trainer_rank.move", pytest.fail)
    trainer.off_device()
    trainer.on_device()
