from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from insitu.datasets.dataset import Dataset
from insitu.errors import NotFound
from insitu.plugins import Component, Kind, find
from insitu.rewards import components

assert components


@dataclass
class StandinParts:
    """What the harness hands to components, without a harness."""

    directory: Path
    llms: dict[str, Any] = field(default_factory=dict)
    evaluators: dict[str, Any] = field(default_factory=dict)

    def llm(self, name: str) -> Any:
        if name not in self.llms:
            raise NotFound(f"llms.{name} does not exist")
        return SimpleNamespace(
            **{
                "api_key": "sk-secret",
                "model": "judge",
                "options": {},
                "max_retries": 2,
                "request_timeout": 5.0,
                "headers": {},
            }
            | self.llms[name]
        )

    async def evaluator(self, name: str) -> Any:
        if name not in self.evaluators:
            raise NotFound(f"eval.evaluators.{name} does not exist")
        return self.evaluators[name]


@pytest.fixture
def parts(tmp_path: Path) -> StandinParts:
    return StandinParts(tmp_path)


@pytest.fixture
def component() -> Callable[..., tuple[Component, Any]]:
    """A registered component and its validated configuration."""

    def make(kind: Kind, type_name: str, **fields: Any) -> tuple[Component, Any]:
        known = find(kind, type_name)
        return known, known.config.model_validate({"_type": type_name, **fields})

    return make


@pytest.fixture
def dataset(parts: StandinParts, component) -> Callable[..., Dataset]:
    def make(type_name: str, **fields: Any) -> Dataset:
        known, config = component(Kind.DATASET, type_name, **fields)
        return known.make(config, parts)

    return make


@pytest.fixture
def evaluator(parts: StandinParts, component) -> Callable[..., Any]:
    def make(type_name: str, **fields: Any) -> Any:
        known, config = component(Kind.EVALUATOR, type_name, **fields)
        return known.make(config, parts)

    return make
