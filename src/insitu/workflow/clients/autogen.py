"""AutoGen (AgentChat): ``autogen_ext.models.openai.OpenAIChatCompletionClient``."""

from __future__ import annotations

from insitu.workflow.clients.sdk import call_options, sdk_args
from insitu.workflow.context import current_rollout
from insitu.workflow.frameworks import package

MODEL_INFO = {
    "family": "unknown",
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "vision": False,
    "multiple_system_messages": True,
}
"""AutoGen knows only OpenAI's models by name; it needs a description of any other."""


def model(llm: str | None = None, **options: object) -> object:
    """Return a model client for `llms.<llm>`; ``model_info`` tells AutoGen what the model can do."""
    autogen = package("autogen_ext.models.openai", "autogen")
    sdk = package("openai", "autogen")
    settings = current_rollout().llm(llm)
    return autogen.OpenAIChatCompletionClient(
        **{
            "model": settings.model,
            "model_info": dict(MODEL_INFO),
            **sdk_args(sdk, settings),
            **call_options(sdk.resources.chat.completions.Completions.create, settings),
            **options,
        }
    )
