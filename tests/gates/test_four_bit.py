"""A 4-bit base on a CPU: gradients of the dequantised base, models that learn, exact merged weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from torch import nn

from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.testing.models import smollm2, tiny
from insitu.training.batching import score_batch
from insitu.training.model.loading import load_policy
from insitu.training.model.lora import AdapterPool
from insitu.training.model.policy import Policy
from insitu.types import LoraSettings, StepSettings
from tests.gates.gate import gate
from tests.support.sequences import make_sequence, train

pytestmark = pytest.mark.timeout(180)

IDS = [[(37 * i) % 4000 + 5 for i in range(48)]]
LORA = LoraSettings(rank=4, alpha=8)
MODELS: list[tuple[str, Callable[[], Path], str]] = [
    ("tiny", tiny, "float32"),
    ("tiny-bf16", tiny, "bfloat16"),
    ("smollm2", smollm2, "bfloat16"),
]


def dequantised(model: Any) -> Any:
    """Return the same base with plain linear layers that hold the dequantised weights."""
    plain = copy.deepcopy(model)
    for name, layer in list(plain.named_modules()):
        if isinstance(layer, Linear4bit):
            weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            linear.weight = nn.Parameter(weight.to(layer.compute_dtype), requires_grad=False)
            linear.bias = layer.bias
            plain.set_submodule(name, linear)
    return plain


def gradients(model: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the gradient of every adapter tensor at random adapters, as one vector."""
    policy, adapter = Policy(model), AdapterPool(model).add(LORA)
    torch.manual_seed(1)
    parameters = list(adapter.parameters().values())
    for parameter in parameters:
        assert parameter.dtype == torch.float32
        nn.init.normal_(parameter, std=0.02)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        with torch.no_grad():  # must leave the weights in a layout that has a gradient
            policy(score_batch(IDS))
        logprob_t, _ = policy(score_batch(IDS))
    logprob_t.mean().backward()
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("name", "model", "precision"), MODELS)
def test_gradients_are_those_of_the_dequantised_base(
    name: str, model: Callable[[], Path], precision: str
) -> None:
    dtype = getattr(torch, precision)
    base = load_policy(str(model()), torch.device("cpu"), dtype, checkpoint_layers=True, four_bit=True).model
    kinds = {type(m) for m in (base.lm_head, base.get_input_embeddings())}
    assert kinds == {nn.Linear, nn.Embedding}, "head and embedding are not quantised"
    if name == "smollm2":
        gate("four-bit-weights", _bytes_per_parameter(base), 0.6, "B/parameter")
    reference = gradients(dequantised(base), dtype)
    found = gradients(base, dtype)
    assert found.shape == reference.shape
    assert reference.norm() > 0
    gate(f"four-bit-{name}", ((found - reference).norm() / reference.norm()).item(), 0.02, "of the gradient")


@pytest.mark.parametrize(("model", "rate"), [(tiny, 5e-3), (smollm2, 1e-3)])
def test_models_learn(model: Callable[[], Path], rate: float) -> None:
    """Tokens with a positive advantage gain probability, those with a negative one lose it."""
    rank = TrainerRank(0, 1, "127.0.0.1", 0, str(model()), "bfloat16", 1, "cpu", 256, four_bit=True)
    rank.open_run("run", LORA)
    rows = [IDS[0][:24], IDS[0][24:]]
    before = rank.score("run", rows)
    sequences = [
        make_sequence(str(i), row, [0] * 8 + [1] * 16, [0.0] * 8 + scores[7:], advantage)
        for i, (row, scores, advantage) in enumerate(zip(rows, before, (1.0, -1.0), strict=True))
    ]
    for _ in range(3):
        assert train(rank, "run", sequences, StepSettings(learning_rate=rate))["updated"] == 1
    gained, lost = (
        sum(after[7:]) - sum(then[7:]) for after, then in zip(rank.score("run", rows), before, strict=True)
    )
    assert gained > 0.5
    assert lost < -0.5


def _bytes_per_parameter(base: Any) -> float:
    linear = [m for m in base.modules() if isinstance(m, Linear4bit)]
    states = [m.weight.quant_state for m in linear]
    held = sum(m.weight.nbytes for m in linear)
    held += sum(state.absmax.nbytes + state.state2.absmax.nbytes for state in states)
    return held / sum(m.in_features * m.out_features for m in linear)


def test_merged_weights_are_the_trained_policy(tmp_path: Path) -> None:
    """The dequantised base and the adapter, added up: a plain model that scores as the trainer does."""
    rank = TrainerRank(0, 1, "127.0.0.1", 0, str(tiny()), "float32", 1, "cpu", 256, four_bit=True)
    rank.open_run("run", LORA)
    sequence = make_sequence("r", IDS[0], [0] * 8 + [1] * 40, [0.0] * 8 + [-9.0] * 40, 1.0)
    train(rank, "run", [sequence], StepSettings(learning_rate=5e-3))
    rank.export_merged("run", str(tmp_path), "float32")
    merged = load_policy(str(tmp_path), torch.device("cpu"))
    with torch.no_grad():
        served, _ = merged(score_batch(IDS))
    trained = torch.tensor(rank.score("run", IDS)[0])
    gate("four-bit-merged", (served - trained).abs().max().item(), 1e-4, "in logprob")
