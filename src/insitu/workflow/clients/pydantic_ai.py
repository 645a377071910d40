"""Pydantic AI: ``OpenAIChatModel``."""

from __future__ import annotations

from insitu.workflow.clients import openai
from insitu.workflow.context import current_rollout
from insitu.workflow.frameworks import package


def model(llm: str | None = None, **options: object) -> object:
    """Return a model for `llms.<llm>`, for ``Agent(model)``."""
    models = package("pydantic_ai.models.openai", "pydantic_ai")
    providers = package("pydantic_ai.providers.openai", "pydantic_ai")
    provider = providers.OpenAIProvider(openai_client=openai.model(llm))
    return models.OpenAIChatModel(current_rollout().llm(llm).model, **{"provider": provider} | options)
