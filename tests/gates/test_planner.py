"""The planner's figures against the trainer's own policy, adapters and head on fake tensors.

Memory is exactly linear in the number of layers, which a test shows; so deep models are measured at two and
three layers and extrapolated.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from insitu.backend.plan.memory import GIB, TrainerMemory, trainer_memory
from insitu.training.footprint.fake_policy import fake_policy
from insitu.training.footprint.measure import measure_config, row_bytes
from insitu.training.footprint.shape import ModelShape
from insitu.training.model.families import families
from insitu.types import LoraSettings
from tests.gates.families.tiny import FAMILIES, config_of, family_of
from tests.gates.gate import gate
from tests.gates.models import MODELS, OTHER_MODELS
from tests.support.known_models import known_shape

pytestmark = pytest.mark.timeout(300)

TOKENS = 4096
WITHIN_PERCENT = 5.0
LENGTHS = (768, 3072, 6144)
SHORTER = (768, 1280, 1792)
"""For layers that keep a state, which torch computes in a loop over the row."""
REPEATED = 3
SAMPLE = ("qwen3_moe",)
OTHERS = (
    *(
        "apertus",
        "cohere2",
        "deepseek_v3",
        "ernie4_5",
        "exaone4",
        "falcon_h1",
        "gemma2",
        "gemma3-window",
        "gemma4",
    ),
    *("glm4_moe", "gpt_oss", "granite", "granitemoehybrid-experts", "hunyuan_v1_dense", "lfm2", "minimax_m2"),
    *("mixtral", "nemotron_h-experts", "olmo3", "phi3", "qwen3_5", "qwen3_next", "seed_oss"),
)


@dataclass(frozen=True)
class Measured:
    """Bytes of one row through forward and backward."""

    base: int
    adapter: int
    """Adapter weights alone; gradients and moments are three times as much."""
    held: int
    working: int
    """The most that the layers need beyond what is held."""
    peak: int
    """The most at any time beyond what is resident."""


def measure(config: Any, num_layers: int, num_tokens: int, *, checkpoint_layers: bool) -> Measured:
    config = copy.deepcopy(config)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    return whole(config, num_tokens, checkpoint_layers=checkpoint_layers)


def whole(config: Any, num_tokens: int, *, checkpoint_layers: bool) -> Measured:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    policy, adapter = fake_policy(config, mode, LoraSettings(rank=16), checkpoint_layers=checkpoint_layers)
    row = row_bytes(policy, mode, num_tokens)
    trained = sum(p.numel() * p.element_size() for p in adapter.parameters().values())
    return Measured(row.resident - trained, trained, row.held, row.working, row.peak)


def extrapolate(config: Any, num_tokens: int, *, checkpoint_layers: bool, step: int = 1) -> Measured:
    """Measure one and two steps of layers beyond the first; every further one adds the same."""
    depth = config.num_hidden_layers
    first = depth % step + step if depth % step else 2 * step
    two, three = (
        measure(config, n, num_tokens, checkpoint_layers=checkpoint_layers) for n in (first, first + step)
    )
    more = (depth - first) // step

    def at_depth(first: int, second: int) -> int:
        return first + more * (second - first)

    return Measured(
        at_depth(two.base, three.base),
        at_depth(two.adapter, three.adapter),
        at_depth(two.held, three.held),
        three.working,
        at_depth(two.peak, three.peak),
    )


def planned_peak(plan: TrainerMemory, num_tokens: int) -> int:
    return plan.held(num_tokens) + plan.working(num_tokens)


def off_by(planned: float, measured: float) -> float:
    return 100 * abs(planned - measured) / measured


def worst_error(shape: ModelShape, config: Any, num_tokens: int, step: int = 1) -> float:
    """Compare a plan with the whole model in both ways of keeping activations."""
    worst = 0.0
    for checkpoint_layers in (True, False):
        found = extrapolate(config, num_tokens, checkpoint_layers=checkpoint_layers, step=step)
        plan = trainer_memory(shape, checkpoint_layers=checkpoint_layers)
        assert plan.base == found.base, "parameters are counted exactly"
        assert plan.adapter == 4 * found.adapter
        errors = {
            "held": off_by(plan.held(num_tokens), found.held),
            "peak": off_by(planned_peak(plan, num_tokens), found.peak),
            "all": off_by(
                plan.base + plan.adapter + planned_peak(plan, num_tokens),
                found.base + 4 * found.adapter + found.peak,
            ),
        }
        worst = max(worst, *errors.values())
    return worst


@pytest.mark.parametrize("name", list(MODELS))
def test_the_planner_knows_what_the_trainer_takes(name: str) -> None:
    worst = worst_error(known_shape(name), MODELS[name], TOKENS)
    gate(f"planner-{name}", worst, WITHIN_PERCENT, "% off")


@pytest.mark.parametrize("num_tokens", [1024, 32768])
def test_short_and_long_rows(num_tokens: int) -> None:
    """A short row is bounded by the head, a long one by a layer; neither is a matter of luck."""
    worst = worst_error(known_shape("qwen2.5-7b"), MODELS["qwen2.5-7b"], num_tokens)
    gate(f"planner-7b-row-{num_tokens}", worst, WITHIN_PERCENT, "% off")


def test_7b_is_small() -> None:
    plan, shape = trainer_memory(known_shape("qwen2.5-7b")), known_shape("qwen2.5-7b")
    found = extrapolate(MODELS["qwen2.5-7b"], TOKENS, checkpoint_layers=True)
    gate("planner-7b-weights", found.base / shape.num_parameters, 2.1, "B/parameter")
    gate("planner-7b-tokens", max(found.held, plan.held(TOKENS)) / TOKENS / 1e6, 0.3, "MB/token")


@pytest.mark.sweep
@pytest.mark.parametrize("name", list(OTHER_MODELS))
def test_other_models_at_their_real_size(name: str) -> None:
    config, step = OTHER_MODELS[name]
    shape = measure_config(copy.deepcopy(config), name)
    worst = max(worst_error(shape, config, num_tokens, step) for num_tokens in (1024, 4096, 16384))
    gate(f"planner-{name}", worst, WITHIN_PERCENT, "% off")


@pytest.mark.parametrize("name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.sweep) for name in OTHERS)])
def test_any_decoder_is_planned_from_one_and_two_layers_of_a_kind(name: str) -> None:
    """Against the whole of a model three times as deep. The head is the same in all: it is measured above."""
    shape = measure_config(deeper(name), name)
    worst = 0.0
    for checkpoint_layers in (True, False):
        plan = trainer_memory(shape, checkpoint_layers=checkpoint_layers)
        for num_tokens in SHORTER if shape.state_values else LENGTHS:
            found = whole(deeper(name), num_tokens, checkpoint_layers=checkpoint_layers)
            layers = plan.activations.working(num_tokens)
            assert plan.base == found.base, "parameters are counted exactly"
            assert plan.adapter == 4 * found.adapter
            held = off_by(plan.held(num_tokens), found.held)
            both = off_by(plan.held(num_tokens) + layers, found.held + found.working)
            worst = max(worst, held, both)
    gate(f"planner-{name}", worst, WITHIN_PERCENT, "% off")


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in FAMILIES if families()[family_of(name)].rejected is None])
def test_every_family_has_a_plan(name: str) -> None:
    config = config_of(name)
    config.architectures = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type, "")]
    shape = measure_config(config, name)
    assert shape.kept_per_token > 0, "an engine keeps something of every token"
    assert trainer_memory(shape).longest_row(2 * GIB, 10_000) > 0


def deeper(name: str) -> Any:
    """Return a family's tiny configuration with every layer repeated in the same order."""
    fields = FAMILIES[name]
    text = fields.get("text_config", fields)
    named = next((text[key] for key in ("layer_types", "layers_block_type") if key in text), None)
    depth = text.get("num_hidden_layers") or len(named)
    changes = {
        key: value * REPEATED
        for key, value in text.items()
        if isinstance(value, list) and len(value) == depth
    }
    if text.get("num_hidden_layers"):
        changes["num_hidden_layers"] = depth * REPEATED
    config = config_of(name, **changes)
    config.architectures = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type, "")]
    return config


@pytest.mark.parametrize("checkpoint_layers", [True, False])
def test_memory_is_exactly_linear_in_depth(checkpoint_layers: bool) -> None:
    config = MODELS["llama-3.1-8b"]
    found = [measure(config, n, 2048, checkpoint_layers=checkpoint_layers) for n in (2, 3, 5, 9)]
    for part in ("base", "adapter", "held", "peak"):
        at = [getattr(each, part) for each in found]
        step = at[1] - at[0]
        assert at == [at[0], at[0] + step, at[0] + 3 * step, at[0] + 7 * step], part
