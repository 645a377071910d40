"""What a model's family does not allow is rejected from its config.json, before anything starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from insitu.backend.plan.compute import Asked, choose
from insitu.backend.plan.cpu import CpuFacts
from insitu.backend.plan.serve_plan import with_family
from insitu.backend.plan.settings import ServeSettings
from insitu.errors import CannotHonour
from insitu.training.model.families import families

FACTS = CpuFacts("x86_64", frozenset({"avx2"}), ((0,), (1,)))


@pytest.fixture
def settings(tmp_path: Path) -> ServeSettings:
    return ServeSettings(tmp_path, "cpu", choose(FACTS, "cpu", Asked()), "adapter", "dedicated", "default")


def model(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_engines_wrap_what_the_trainer_adapts(settings: ServeSettings, tmp_path: Path) -> None:
    served, lines = with_family(settings, model(tmp_path, model_type="lfm2"))
    assert lines == []
    command = served.engine("m", "m").command(1)
    adapts = families()["lfm2"].adapts
    assert {*adapts} <= {*command[command.index("--lora-target-modules") :]}
    assert {"in_proj", "w1", "w2", "w3"} <= set(adapts)
    assert "--no-enable-prefix-caching" in command, "vLLM shares states of prompts in chunks alone"


def test_what_gets_no_adapter_is_said(settings: ServeSettings, tmp_path: Path) -> None:
    _, (experts,) = with_family(settings, model(tmp_path, model_type="qwen3_moe"))
    assert (
        experts == "adapters: on k_proj, o_proj, q_proj, v_proj of this qwen3_moe model; without the experts"
    )
    _, (untried,) = with_family(settings, model(tmp_path, model_type="nemotron_h"))
    assert untried.startswith("model: nemotron_h was not tried with experts: vLLM: ")
    _, (fused,) = with_family(settings, model(tmp_path, model_type="glm4"))
    assert fused.endswith("without gate_up_proj")


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        ({"model_type": "stablelm"}, {}, r"is not supported for LoRA"),
        ({"model_type": "qwen3_moe"}, {"publication": "merged"}, r"a CPU's default: .* \(qwen3_moe\)"),
        ({"model_type": "qwen3_moe"}, {"num_ranks": 2}, r"--trainer-ranks 2: .* \(qwen3_moe\)"),
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, {}, "are quantised"),
    ],
    ids=["no adapters", "merged", "ranks", "quantised"],
)
def test_what_a_family_does_not_allow_is_rejected_with_what_would_work(
    config: dict[str, Any], changes: dict[str, Any], said: str, settings: ServeSettings, tmp_path: Path
) -> None:
    with pytest.raises(CannotHonour, match=said) as raised:
        with_family(replace(settings, **changes), model(tmp_path, **config))
    assert raised.value.hint


@pytest.mark.parametrize("config", [{"model_type": "gpt2"}, {}], ids=["new", "none"])
def test_a_family_that_was_never_tried_is_served_and_said(
    config: dict[str, Any], settings: ServeSettings, tmp_path: Path
) -> None:
    served, (line,) = with_family(settings, model(tmp_path, **config))
    assert served.lora_modules is None
    assert "was never tried (docs/models.md)" in line or "has no config.json" in line


def test_a_family_that_transformers_does_not_have_is_rejected(
    settings: ServeSettings, tmp_path: Path
) -> None:
    with pytest.raises(
        CannotHonour, match=r"family brand_new, of which Transformers \S+ has no model"
    ) as raised:
        with_family(settings, model(tmp_path, model_type="brand_new"))
    assert "docs/models.md" in (raised.value.hint or "")


def test_two_thirds_of_the_table_are_served() -> None:
    served = [family for family in families().values() if family.rejected is None]
    assert len(served) >= 40
    assert all(family.adapts for family in served)
