"""The classes by which frameworks say that an agent came to its own limit: a renamed one fails here."""

from __future__ import annotations

import importlib

import pytest

from insitu.types import Ending
from insitu.workflow.classify import ending_of

STEP_LIMITS = (
    ("langgraph.errors", "GraphRecursionError", ("Recursion limit of 25 reached",)),
    ("agents.exceptions", "MaxTurnsExceeded", ("Max turns (3) exceeded",)),
    ("google.adk.agents.invocation_context", "LlmCallsLimitExceededError", ("Max number of llm calls",)),
    ("pydantic_ai.exceptions", "UsageLimitExceeded", ("The next request would exceed the request_limit",)),
    ("langchain.agents.middleware.model_call_limit", "ModelCallLimitExceededError", (3, 0, 3, None)),
)


@pytest.mark.parametrize(("module", "name", "arguments"), STEP_LIMITS)
def test_the_limit_of_a_framework_ends_as_step_limit(
    module: str, name: str, arguments: tuple[object, ...]
) -> None:
    raised = getattr(importlib.import_module(module), name)(*arguments)
    assert ending_of(raised) is Ending.STEP_LIMIT
