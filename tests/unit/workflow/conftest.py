"""Contexts of rollouts that belong to no run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import SecretStr

from insitu.plugins import ComponentConfig
from insitu.workflow.binding import LLMBinding
from insitu.workflow.context import WorkflowContext
from insitu.workflow.kinds.registered import RegisteredConfig
from insitu.workflow.workflow import Workflow

MakeContext = Callable[..., WorkflowContext]


@dataclass
class Entry:
    """What an entry of `llms` has."""

    model_name: str = "base"
    api_key: SecretStr = field(default_factory=lambda: SecretStr("own-key"))
    base_url: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    max_retries: int = 10
    request_timeout: float | None = None


BINDING = LLMBinding(
    llms={
        "policy": Entry(options={"temperature": 0.4}),
        "judge-1": Entry("big", SecretStr("judge-key"), "http://judge:9000/v1"),
    },
    trained=frozenset({"policy"}),
    model="my-run",
    gateway_url="http://gateway:8000",
    api_key="gateway-key",
)


def config(**fields: Any) -> ComponentConfig:
    """The configuration of some workflow."""
    return RegisteredConfig.model_validate({"_type": "test", **fields})


class Calls(Workflow):
    """A workflow around a coroutine function `(value, context)`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def run(self, value: Any, context: WorkflowContext) -> Any:
        return await self._function(value, context)


@pytest.fixture
def make_context() -> MakeContext:
    def make(**fields: Any) -> WorkflowContext:
        given = {"rollout_id": "r1", "example_id": "e1", "config": config(), "binding": BINDING}
        return WorkflowContext(**(given | fields))

    return make


@pytest.fixture
def context(make_context: MakeContext) -> WorkflowContext:
    return make_context()
