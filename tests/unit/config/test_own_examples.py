"""The configurations that the README and the examples show are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from insitu.config.load import load_config, parse_config

ROOT = Path(__file__).resolve().parents[3]


def test_the_readmes_configuration_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.delenv("INSITU_API_KEY", raising=False)
    config = parse_config(yaml.safe_load(block))
    assert config.finetuning.enabled
    assert set(config.llms) == {"policy"}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*/config.yml")), ids=lambda p: p.parent.name
)
def test_the_examples_are_valid(path: Path) -> None:
    config = load_config(path).config
    assert config.finetuning.enabled
    assert config.finetuning.reward_function is not None
