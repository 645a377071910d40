"""The recommended learning rate, and the files that repeat it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from insitu.learning_rate import FAR, parameters_in_name, rate_warning, recommended_rate

ROOT = Path(__file__).resolve().parents[2]


def test_it_is_what_was_measured_at_135m() -> None:
    assert recommended_rate(0.135e9) == 5e-4


@pytest.mark.parametrize(("billions", "low", "high"), [(3, 5e-5, 2e-4), (4, 2e-5, 8e-5), (72, 1e-5, 3e-5)])
def test_it_lies_among_the_published_recipes(billions: float, low: float, high: float) -> None:
    assert low <= recommended_rate(billions * 1e9) <= high


def test_an_update_grows_with_alpha_and_its_noise_falls_with_the_batch() -> None:
    assert recommended_rate(0.135e9, alpha=64) == pytest.approx(1e-4)
    assert recommended_rate(0.135e9, rollouts_per_update=256) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen2.5-3B-Instruct", 3),
        ("SmolLM2-135M-Instruct", 0.135),
        ("Qwen/Qwen3-0.6B", 0.6),
        ("qwen3-30b-a3b", 30),
        ("smollm2", None),
        ("org-7B/model", None),
    ],
)
def test_the_size_is_read_from_the_name(name: str, billions: float | None) -> None:
    assert parameters_in_name(name) == (None if billions is None else pytest.approx(billions * 1e9))


def test_a_rate_far_away_is_told() -> None:
    assert rate_warning(1e-4, 9e-5) == ""
    assert rate_warning(1e-5, 9e-5).startswith("learning_rate 1e-05 is 1/9 of the 9e-05 to begin with")
    assert rate_warning(1e-3, 9e-5).startswith("learning_rate 0.001 is 11 times the 9e-05")
    assert FAR == 4


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*/config-gpu.yaml")), ids=str)
def test_examples_for_gpus_have_the_recommended_rate(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    model = config["model"] if isinstance(config["model"], str) else config["model"]["model_name"]
    size = parameters_in_name(model)
    assert size is not None
    assert float(config["training"]["learning_rate"]) == recommended_rate(size)
    assert "alpha" not in path.read_text()


@pytest.mark.parametrize("page", ["README.md", "docs/finetune.md", "src/insitu/scaffold/shared/README.md"])
def test_pages_that_show_a_3b_model_have_its_rate(page: str) -> None:
    text = (ROOT / page).read_text()
    shown = f"{recommended_rate(3e9):.0e}".replace("e-0", "e-")
    assert "Qwen2.5-3B" in text
    assert re.search(rf"(learning_rate[\": ]+|`learning_rate`: ){shown}", text)
