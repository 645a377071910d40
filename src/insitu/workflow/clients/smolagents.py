"""smolagents: ``OpenAIModel``."""

from __future__ import annotations

from insitu.workflow.clients.sdk import call_options, sdk_args
from insitu.workflow.context import current_rollout
from insitu.workflow.frameworks import package


def model(llm: str | None = None, **options: object) -> object:
    """Return a model for `llms.<llm>`, for code and tool-calling agents; it blocks, so agents are `def`."""
    smolagents = package("smolagents", "smolagents")
    sdk = package("openai", "smolagents")
    settings = current_rollout().llm(llm)
    args = sdk_args(sdk, settings, sync=True)
    return smolagents.OpenAIModel(
        **{
            "model_id": settings.model,
            "api_base": args.pop("base_url"),
            "api_key": args.pop("api_key"),
            "client_kwargs": args,
            "retry": False,  # the SDK retries, up to `max_retries`
            **call_options(sdk.resources.chat.completions.Completions.create, settings),
            **options,
        }
    )
