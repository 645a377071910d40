"""The OpenAI SDK: ``AsyncOpenAI``, or ``OpenAI`` with ``sync=True``."""

from __future__ import annotations

from insitu.workflow.clients.sdk import sdk_client
from insitu.workflow.context import current_rollout
from insitu.workflow.frameworks import package


def model(llm: str | None = None, *, sync: bool = False, **options: object) -> object:
    """Return a client for `llms.<llm>` that sends its sampling options; pass ``context.llm().model``."""
    sdk = package("openai", "openai")
    kind = sdk.OpenAI if sync else sdk.AsyncOpenAI
    return sdk_client(kind, sdk, current_rollout().llm(llm), sync=sync, **options)
