"""LiteLLM: ``completion`` and ``acompletion`` for the current rollout."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from insitu.workflow.clients.sdk import sdk_args
from insitu.workflow.context import current_rollout
from insitu.workflow.frameworks import package
from insitu.workflow.llm import Arguments, LLMSettings


class BoundLiteLLM:
    """``litellm.completion`` and ``litellm.acompletion`` with model, address and options filled in."""

    def __init__(
        self, litellm: ModuleType, sdk: ModuleType, settings: LLMSettings, options: dict[str, object]
    ) -> None:
        self._litellm = litellm
        self._client = sdk.OpenAI(**sdk_args(sdk, settings, sync=True))
        self._async_client = sdk.AsyncOpenAI(**sdk_args(sdk, settings))
        self.args: Arguments = {
            "model": f"openai/{settings.model}",
            "api_base": settings.base_url,
            "api_key": settings.api_key,
            "max_retries": settings.max_retries,
            **({} if settings.request_timeout is None else {"timeout": settings.request_timeout}),
            **settings.options,
            **options,
        }
        """For anything else built on LiteLLM; its calls belong to the function in which this was made."""

    def completion(self, messages: Sequence[object], **options: object) -> Any:
        """Call `litellm.completion` with a client that marks each call with the function that makes it."""
        return self._litellm.completion(messages=messages, **self.args | {"client": self._client} | options)

    async def acompletion(self, messages: Sequence[object], **options: object) -> Any:
        """Call `litellm.acompletion` likewise."""
        args = self.args | {"client": self._async_client} | options
        return await self._litellm.acompletion(messages=messages, **args)


def model(llm: str | None = None, **options: object) -> BoundLiteLLM:
    """Return LiteLLM's two calls for `llms.<llm>`."""
    litellm, sdk = package("litellm", "litellm"), package("openai", "litellm")
    return BoundLiteLLM(litellm, sdk, current_rollout().llm(llm), options)
