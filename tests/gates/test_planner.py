"""The planner's figures against the trainer's own policy, adapters and head on fake tensors.

Memory is exactly linear in the number of layers, which a test shows; so deep models are measured at two and
three layers and extrapolated.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from insitu.backend.plan.memory import TrainerMemory, trainer_memory
from insitu.types import LoraSettings
from tests.gates.gate import gate
from tests.gates.models import MODELS
from tests.support.fake_policy import fake_policy, row_bytes
from tests.support.known_models import known_shape

pytestmark = pytest.mark.timeout(120)

TOKENS = 4096
WITHIN_PERCENT = 10.0


@dataclass(frozen=True)
class Measured:
    """Bytes of one row through forward and backward."""

    base: int
    adapter: int
    """Adapter weights alone; gradients and moments are three times as much."""
    held: int
    peak: int
    """The most at any time beyond what is resident."""


def measure(name: str, num_layers: int, num_tokens: int, *, checkpoint_layers: bool) -> Measured:
    config = copy.deepcopy(MODELS[name])
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    lora = LoraSettings(rank=16, alpha=32)
    policy, adapter = fake_policy(config, mode, lora, checkpoint_layers=checkpoint_layers)
    row = row_bytes(policy, mode, num_tokens)
    trained = sum(p.numel() * p.element_size() for p in adapter.parameters().values())
    return Measured(row.resident - trained, trained, row.held, row.peak)


def extrapolate(name: str, num_tokens: int, *, checkpoint_layers: bool) -> Measured:
    """Measure two and three layers; every further layer adds the same."""
    two, three = (measure(name, n, num_tokens, checkpoint_layers=checkpoint_layers) for n in (2, 3))
    more = MODELS[name].num_hidden_layers - 2

    def at_depth(first: int, second: int) -> int:
        return first + more * (second - first)

    return Measured(
        at_depth(two.base, three.base),
        at_depth(two.adapter, three.adapter),
        at_depth(two.held, three.held),
        at_depth(two.peak, three.peak),
    )


def planned_peak(plan: TrainerMemory, num_tokens: int) -> int:
    return plan.held(num_tokens) + plan.working(num_tokens)


def off_by(planned: float, measured: float) -> float:
    return 100 * abs(planned - measured) / measured


@pytest.mark.parametrize("name", list(MODELS))
def test_the_planner_knows_what_the_trainer_takes(name: str) -> None:
    shape = known_shape(name)
    worst = 0.0
    for checkpoint_layers in (True, False):
        found = extrapolate(name, TOKENS, checkpoint_layers=checkpoint_layers)
        plan = trainer_memory(shape, checkpoint_layers=checkpoint_layers)
        assert plan.base == found.base, "parameters are counted exactly"
        assert plan.adapter == 4 * found.adapter
        errors = {
            "held": off_by(plan.held(TOKENS), found.held),
            "peak": off_by(planned_peak(plan, TOKENS), found.peak),
            "all": off_by(
                plan.base + plan.adapter + planned_peak(plan, TOKENS),
                found.base + 4 * found.adapter + found.peak,
            ),
        }
        if checkpoint_layers:  # without it, the head hides the layer at this length
            errors["layer"] = off_by(plan.working(TOKENS), found.peak - found.held)
        worst = max(worst, *errors.values())
    gate(f"planner-{name}", worst, WITHIN_PERCENT, "% off")


def test_7b_is_small() -> None:
    plan, shape = trainer_memory(known_shape("qwen2.5-7b")), known_shape("qwen2.5-7b")
    found = extrapolate("qwen2.5-7b", TOKENS, checkpoint_layers=True)
    gate("planner-7b-weights", found.base / shape.num_parameters, 2.1, "B/parameter")
    gate("planner-7b-tokens", max(found.held / TOKENS, plan.held_per_token) / 1e6, 0.3, "MB/token")


@pytest.mark.parametrize("num_tokens", [1024, 32768])
def test_short_and_long_rows(num_tokens: int) -> None:
    """A short row is bounded by the head, a long one by a layer; neither is a matter of luck."""
    found = extrapolate("qwen2.5-7b", num_tokens, checkpoint_layers=True)
    planned = planned_peak(trainer_memory(known_shape("qwen2.5-7b")), num_tokens)
    gate(f"planner-7b-row-{num_tokens}", off_by(planned, found.peak), WITHIN_PERCENT, "% off")


@pytest.mark.parametrize("checkpoint_layers", [True, False])
def test_memory_is_exactly_linear_in_depth(checkpoint_layers: bool) -> None:
    found = [measure("llama-3.1-8b", n, 2048, checkpoint_layers=checkpoint_layers) for n in (2, 3, 5, 9)]
    for part in ("base", "adapter", "held", "peak"):
        at = [getattr(each, part) for each in found]
        step = at[1] - at[0]
        assert at == [at[0], at[0] + step, at[0] + 3 * step, at[0] + 7 * step], part
