"""LLM objects of agent frameworks for the current rollout: one module each, imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from insitu.errors import InvalidRequest
from insitu.plugins import nearest

FRAMEWORKS = (
    "anthropic",
    "autogen",
    "crewai",
    "dspy",
    "google_adk",
    "haystack",
    "langchain",
    "litellm",
    "llama_index",
    "openai",
    "openai_agents",
    "pydantic_ai",
    "smolagents",
    "strands",
)
"""Each is a module here with ``model(llm=None, **options)``; its extra has `-` instead of `_`."""


def client_maker(framework: str) -> Callable[..., Any]:
    """Return the function that makes the framework's LLM object for `current_rollout()`."""
    if framework not in FRAMEWORKS:
        raise InvalidRequest(
            f"there is no client for `{framework}`{nearest(framework, FRAMEWORKS)}",
            hint=f"known: {', '.join(FRAMEWORKS)}; others take what context.llm() says",
        )
    return importlib.import_module(f"{__name__}.{framework}").model


def package(name: str, framework: str) -> Any:
    """Import an optional package; if that fails, the error names the extra to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InvalidRequest(
            f"the client for {framework} cannot import `{name}`: {error}",
            hint=f"pip install 'insitu[{framework.replace('_', '-')}]'",
        ) from error
