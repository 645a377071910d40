"""Agent frameworks with a client of their own, and their optional packages."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

from insitu.errors import InvalidRequest
from insitu.plugins import nearest
from insitu.system.torch_builds.installing import install_command

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
"""Each is a module of `insitu.workflow.clients` with ``model(llm=None, **options)``; extras say `-`."""


def client_maker(framework: str) -> Callable[..., object]:
    """Return the function that makes the framework's LLM object for `current_rollout()`."""
    if framework not in FRAMEWORKS:
        raise InvalidRequest(
            f"there is no client for `{framework}`{nearest(framework, FRAMEWORKS)}",
            hint=f"known: {', '.join(FRAMEWORKS)}; any other client works with the settings of context.llm()",
        )
    return importlib.import_module(f"insitu.workflow.clients.{framework}").model


def package(name: str, framework: str) -> ModuleType:
    """Import an optional package; if that fails, the error names the extra to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InvalidRequest(
            f"the client for {framework} cannot import `{name}`: {error}",
            hint=install_command(f"insitu[{framework.replace('_', '-')}]"),
        ) from error
