"""Google ADK: its ``AnthropicLlm``, for ``LlmAgent(model=...)``.

Of ADK's own models, it is the one that takes a client object, so that concurrent rollouts share nothing;
its ``LiteLlm`` sets process-wide options.
"""

from __future__ import annotations

from insitu.workflow.clients import anthropic
from insitu.workflow.context import current_rollout
from insitu.workflow.frameworks import package


def model(llm: str | None = None, **options: object) -> object:
    """Return a model for `llms.<llm>` over Anthropic's protocol, which the gateway speaks too."""
    models = package("google.adk.models.anthropic_llm", "google_adk")
    settings = current_rollout().llm(llm)
    given: dict[str, object] = {"model": settings.model, "client": anthropic.model(llm)}
    if "max_tokens" in settings.options:  # else it asks for 8,192
        given["max_tokens"] = settings.options["max_tokens"]
    return models.AnthropicLlm(**given | options)
