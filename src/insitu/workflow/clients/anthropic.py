"""The Anthropic SDK: ``AsyncAnthropic``, or ``Anthropic`` with ``sync=True``."""

from __future__ import annotations

from insitu.workflow.clients.sdk import sdk_client
from insitu.workflow.context import current_rollout
from insitu.workflow.frameworks import package
from insitu.workflow.llm import without_version


def model(llm: str | None = None, *, sync: bool = False, **options: object) -> object:
    """Return a client for `llms.<llm>` that sends its sampling options; pass ``context.llm().model``."""
    sdk = package("anthropic", "anthropic")
    kind = sdk.Anthropic if sync else sdk.AsyncAnthropic
    settings = current_rollout().llm(llm)
    address: dict[str, object] = {
        "base_url": without_version(settings.rollout_url)
    }  # this SDK adds /v1 itself
    return sdk_client(kind, sdk, settings, sync=sync, **address | options)
