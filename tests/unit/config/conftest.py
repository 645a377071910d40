"""Components and files for tests of the configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, SecretStr

from insitu import plugins
from insitu.plugins import ComponentConfig, Kind, Section


class AgentConfig(ComponentConfig):
    llm: str
    args: dict[str, Any] = Field(default_factory=dict)
    headers: dict[str, SecretStr] = Field(default_factory=dict)


class RewardConfig(ComponentConfig):
    tolerance: float = 0.0
    key: str | None = None


class FileConfig(ComponentConfig):
    file_path: Path


class BuilderConfig(ComponentConfig):
    num_generations: int = Field(default=2, ge=1)


class Backend(Section):
    ip: str
    port: int
    api_key: SecretStr = SecretStr("default")
    engine_args: dict[str, Any] = Field(default_factory=dict)


class AdapterConfig(ComponentConfig):
    backend: Backend


@pytest.fixture(autouse=True)
def components(monkeypatch: pytest.MonkeyPatch) -> None:
    """The components that these tests name; gone afterwards."""
    plugins.load_entry_points()
    plugins.load_entry_points()  # first: what is loaded later would be forgotten with the copy
    monkeypatch.setattr(plugins, "_components", dict(plugins._components))
    for kind, name, config in (
        (Kind.WORKFLOW, "test_agent", AgentConfig),
        (Kind.EVALUATOR, "test_reward", RewardConfig),
        (Kind.DATASET, "test_file", FileConfig),
        (Kind.TRAJECTORY_BUILDER, "test_builder", BuilderConfig),
        (Kind.TRAINER_ADAPTER, "test_adapter", AdapterConfig),
        (Kind.TRAINER, "test_trainer", ComponentConfig),
    ):
        plugins.register(kind, name, config)(lambda config, parts: None)


BASIC = """
llms:
  policy:
    _type: openai
    model_name: tiny
    base_url: http://localhost:8000/v1
    api_key: sk-do-not-show
    temperature: 0.4
workflow:
  _type: test_agent
  llm: policy
eval:
  general:
    dataset:
      _type: test_file
      file_path: data/train.json
  evaluators:
    reward:
      _type: test_reward
trajectory_builders:
  builder: {_type: test_builder}
trainer_adapters:
  adapter:
    _type: test_adapter
    backend: {ip: localhost, port: 7623}
trainers:
  trainer: {_type: test_trainer}
finetuning:
  enabled: true
  trainer: trainer
  trajectory_builder: builder
  trainer_adapter: adapter
  reward_function: {name: reward}
"""


@pytest.fixture
def basic() -> str:
    """A whole file."""
    return BASIC


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Write a file and give its path."""

    def _write(text: str) -> Path:
        path = tmp_path / "config.yml"
        path.write_text(text)
        return path

    return _write
