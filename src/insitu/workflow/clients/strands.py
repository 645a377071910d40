"""Strands Agents: ``strands.models.openai.OpenAIModel``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from insitu.workflow.clients.sdk import call_options, loose_http_client, sdk_args
from insitu.workflow.context import current_rollout
from insitu.workflow.frameworks import package


def model(llm: str | None = None, **options: object) -> object:
    """Return a model for `llms.<llm>`; ``params`` are options of its calls."""
    strands = package("strands.models.openai", "strands")
    sdk = package("openai", "strands")
    settings = current_rollout().llm(llm)
    params = call_options(sdk.resources.chat.completions.Completions.create, settings)
    # Strands runs each blocking call in its own loop.
    client_args = sdk_args(sdk, settings) | {"http_client": loose_http_client(sdk, settings)}
    return strands.OpenAIModel(
        **{
            "model_id": settings.model,
            "client_args": client_args,
            **options,
            "params": {**params, **cast("Mapping[str, object]", options.get("params") or {})},
        }
    )
