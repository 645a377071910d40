"""The SDK of OpenAI: ``AsyncOpenAI``, or ``OpenAI`` with ``sync=True``."""

from __future__ import annotations

from typing import Any

from insitu.workflow.clients import package
from insitu.workflow.clients.sdk import sdk_args
from insitu.workflow.context import current_rollout


def model(llm: str | None = None, *, sync: bool = False, **options: Any) -> Any:
    """A client for `llms.<llm>`; its model and sampling options are in ``context.llm().call_args()``."""
    sdk = package("openai", "openai")
    kind = sdk.OpenAI if sync else sdk.AsyncOpenAI
    return kind(**sdk_args(sdk, current_rollout().llm(llm), sync=sync) | options)
