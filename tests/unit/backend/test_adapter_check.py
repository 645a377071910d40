"""An adapter is served whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.backend.fleet.replica import EngineClient
from insitu.backend.in_engine.adapters import computed_layers, left_out
from insitu.errors import CannotHonour
from tests.unit.backend.test_engine_client import StandinEngine, engine, standin

__all__ = ["engine", "standin"]  # fixtures
WRAPPED = ["model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj", "lm_head"]
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def tensors(*layers: str) -> dict[str, str]:
    return {f"base_model.model.{layer}.lora_{half}.weight": layer for layer in layers for half in "AB"}


def test_a_packed_layer_computes_its_parts() -> None:
    computed = computed_layers(WRAPPED, PACKED)
    attention = [f"model.layers.0.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    assert left_out(tensors(*attention), computed) == []
    assert left_out(tensors("model.layers.0.self_attn.qkv_proj"), computed) == []


def test_what_is_not_wrapped_not_mapped_or_half_there_is_named() -> None:
    computed = computed_layers(WRAPPED, PACKED)
    mixer = tensors("model.layers.0.linear_attn.in_proj_qkv")
    renamed = tensors("language_model.model.layers.0.self_attn.q_proj")
    assert left_out(mixer | tensors("model.layers.0.self_attn.o_proj"), computed) == sorted(mixer)
    assert left_out(renamed, computed) == sorted(renamed)
    (half, _), other = tensors("model.layers.0.self_attn.k_proj").items(), "model.layers.0.self_attn.k_proj"
    assert left_out({half[0]: other}, computed) == [half[0]]


async def test_an_adapter_of_which_a_part_would_be_dropped_is_not_loaded(
    engine: EngineClient, standin: StandinEngine
) -> None:
    lost = [f"base_model.model.layers.{number}.linear_attn.in_proj.lora_A.weight" for number in range(5)]
    standin.answers["/collective_rpc"] = {"results": [lost[:4], lost[1:]]}
    with pytest.raises(CannotHonour, match=r"run@1 without 5 of its tensors: base_model.*, …") as raised:
        await engine.load_adapter("run@1", Path("/weights/1"))
    assert "lora.target_modules" in raised.value.hint
    assert [path for path, _ in standin.requests] == ["/collective_rpc"]
