"""Haystack: ``OpenAIChatGenerator``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from insitu.workflow.clients.sdk import call_options, sdk_args
from insitu.workflow.context import current_rollout
from insitu.workflow.frameworks import package


def model(llm: str | None = None, **options: object) -> object:
    """Return a chat generator for `llms.<llm>`, for agents and pipelines, blocking and async."""
    chat = package("haystack.components.generators.chat", "haystack")
    secret = package("haystack.utils", "haystack").Secret
    sdk = package("openai", "haystack")
    settings = current_rollout().llm(llm)
    generation = call_options(sdk.resources.chat.completions.Completions.create, settings)
    made = chat.OpenAIChatGenerator(
        **{
            "model": settings.model,
            "api_base_url": settings.rollout_url,
            "api_key": secret.from_token(settings.api_key),
            "max_retries": settings.max_retries,
            "timeout": settings.request_timeout,
            **options,
            "generation_kwargs": {
                **generation,
                **cast("Mapping[str, object]", options.get("generation_kwargs") or {}),
            },
        }
    )
    # It opens its own clients at the first call unless they are already set.
    made.client = sdk.OpenAI(**sdk_args(sdk, settings, sync=True))
    made.async_client = sdk.AsyncOpenAI(**sdk_args(sdk, settings))
    return made
