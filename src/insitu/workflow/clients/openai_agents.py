"""OpenAI Agents SDK: a ``Model`` for ``Agent(model=...)``."""

from __future__ import annotations

from insitu.workflow.clients import openai
from insitu.workflow.context import current_rollout
from insitu.workflow.frameworks import package


def model(llm: str | None = None, *, responses: bool = False, **options: object) -> object:
    """Return a model for `llms.<llm>` over chat completions, or over the Responses API."""
    agents = package("agents", "openai_agents")
    kind = agents.OpenAIResponsesModel if responses else agents.OpenAIChatCompletionsModel
    given = {"model": current_rollout().llm(llm).model, "openai_client": openai.model(llm)}
    return kind(**given | options)
