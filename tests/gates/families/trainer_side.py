"""One family through the trainer: log-probabilities, gradients, checkpointing, names of tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from insitu.errors import CannotHonour
from insitu.training.batching import score_batch
from insitu.training.model.loading import (
    empty_model,
    load_policy,
    load_shards,
    materialise,
    prepare,
    tensor_names,
)
from insitu.training.model.lora import Adapter, AdapterPool, merged_tensors
from insitu.training.model.policy import Policy
from insitu.training.model.self_check import branch_errors
from insitu.types import LoraSettings
from tests.gates.families.tiny import WRAPPERS, config_of, family_of

ROWS = (
    [5, 9, 17, 33, 60, 61, 7, 8, 99, 100, 101, 33, 44, 55, 66, 77, 88, 12],
    [7, 8, 99, 100, 101, 33],
    [3, 4, 5, 6, 9, 10, 11, 40, 41, 42, 43],
)
RANK = 4
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Trained:
    """What the trainer does with a family."""

    layers: tuple[str, ...]
    """Linear layers, by the last part of their names."""
    experts: bool
    """True if weights of experts, which are no linear layers, get no adapter."""
    logprobs: float
    """The largest difference from the model's own, over rows of unequal lengths in one batch."""
    gradients: float
    """The largest relative difference from those of the plain model."""
    checkpointed: float
    """The same, with each layer computed again."""
    shares: bool
    """True if rows branch, so that a prompt that rollouts share is computed once."""
    branches: float
    """The error of a branch beside another one, if rows branch."""
    in_shards: bool
    """True if a rank that reads its part of the files has the same model."""
    merged: bool
    """True if merged weights can be written by the names of the files."""


def save_tiny(family: str, folder: Path, **changes: Any) -> Path:
    """Write a random model of the family, with changes to its configuration, as the hub would have it."""
    torch.manual_seed(0)
    kind: Any = AutoModelForImageTextToText if family_of(family) in WRAPPERS else AutoModelForCausalLM
    model = kind.from_config(config_of(family, **changes))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    for name in {name for name, _ in model.named_buffers()} & model.state_dict().keys():
        model.get_buffer(name).normal_(0.9, 0.1)
    model.save_pretrained(folder)
    return folder


def own_logprobs(model: Any, rows: Sequence[list[int]] = ROWS) -> Tensor:
    """Return the model's own log-probabilities of each row's tokens, one row at a time."""
    found: list[Tensor] = []
    for row in rows:
        ids = torch.tensor([row])
        logprobs = model(input_ids=ids, use_cache=False).logits.float()[0].log_softmax(-1)
        found.append(logprobs[:-1].gather(-1, ids[0, 1:, None]).squeeze(-1))
    return torch.cat(found)


def examine(folder: Path, adapter_folder: Path, without: Collection[str] = ()) -> Trained:
    """Take a saved model through the trainer, and write an adapter of it as a step does."""
    policy, adapter = _with_adapter(folder, without)
    batch = score_batch(ROWS)
    scored, _ = policy(batch)
    attention = policy.model.config._attn_implementation
    policy.model.set_attn_implementation("eager")  # the family's own definition
    own = own_logprobs(policy.model)
    policy.model.set_attn_implementation(attention)
    gradients = _gradients(scored, adapter)
    again, other = _with_adapter(folder, without, checkpoint_layers=True)
    found = Trained(
        layers=tuple(sorted({name.rpartition(".")[2] for name in adapter.layers})),
        experts=any(p.dim() == 3 and ".experts." in name for name, p in policy.model.named_parameters()),
        logprobs=(scored - own).abs().max().item(),
        gradients=_difference(gradients, _gradients(own, adapter)),
        checkpointed=_difference(gradients, _gradients(again(batch)[0], other)),
        shares=policy.can_branch,
        branches=branch_errors(policy)[0] if policy.can_branch else 0.0,
        in_shards=_reads_shards(folder),
        merged={tensor.name for tensor in merged_tensors(policy.model, adapter)} <= tensor_names(folder),
    )
    write_adapter(adapter, str(folder), adapter_folder)
    return found


def _reads_shards(folder: Path) -> bool:
    """Load the model as one of several ranks does, and compare it with the whole."""
    config = AutoConfig.from_pretrained(folder)
    policy = prepare(empty_model(config, torch.float32), checkpoint_layers=False)
    materialise(policy, CPU)
    alone: Any = SimpleNamespace(get_local_rank=lambda: 0, size=lambda: 1)
    try:
        load_shards(policy.model, folder, alone)
    except CannotHonour:
        return False
    whole, batch = load_policy(str(folder), CPU), score_batch(ROWS)
    with torch.no_grad():
        torch.testing.assert_close(policy(batch)[0], whole(batch)[0], rtol=0, atol=1e-5)
    return True


def write_adapter(adapter: Adapter, base: str, folder: Path) -> None:
    """Write the two files that an engine loads."""
    folder.mkdir(parents=True)
    tensors = {name: parameter.detach().contiguous() for name, parameter in adapter.parameters().items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_bytes(orjson.dumps(adapter.config(base)))


def _with_adapter(
    folder: Path, without: Collection[str], *, checkpoint_layers: bool = False
) -> tuple[Policy, Adapter]:
    policy = load_policy(str(folder), CPU, checkpoint_layers=checkpoint_layers)
    pool = AdapterPool(policy.model)
    targets = sorted(pool.linear_layers - set(without))
    adapter = pool.add(LoraSettings(rank=RANK, target_modules=targets))
    torch.manual_seed(1)
    for name, parameter in adapter.parameters().items():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return policy, adapter


def _gradients(logprobs: Tensor, adapter: Adapter) -> dict[str, Tensor]:
    for parameter in adapter.parameters().values():
        parameter.grad = None
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return {name: _grad(name, parameter) for name, parameter in adapter.parameters().items()}


def _grad(name: str, parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise AssertionError(f"{name} gets no gradient")
    return parameter.grad.clone()


def _difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    return max((found[name] - expected[name]).abs().max().item() for name in expected) / largest
