"""The settings that an agent needs to call a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Arguments = dict[str, Any]
"""Keyword arguments that agents pass on with `**`, which a type checker allows for no other value type."""


@dataclass(frozen=True, slots=True)
class LLMSettings:
    """One entry of `llms`; inside a rollout, entries on the gateway have the rollout's own address."""

    name: str
    """Its key in `llms`."""
    model: str
    base_url: str
    api_key: str = field(repr=False)
    options: Mapping[str, Any] = field(default_factory=Arguments)
    """Options sent with every call: temperature, top_p, seed, and anything else in the YAML."""
    max_retries: int = 10
    request_timeout: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Needed only by clients that cannot use `base_url` as is. Empty if calls belong to no rollout."""
    rollout_url: str = ""
    """`base_url` without the function, for clients that send it with every call (`insitu.function`)."""

    @property
    def root_url(self) -> str:
        """`base_url` without `/v1`, as clients of the Anthropic protocol expect it."""
        return without_version(self.base_url)

    def client_args(self) -> Arguments:
        """Return the arguments for ``openai.OpenAI`` and ``openai.AsyncOpenAI``."""
        args = {"base_url": self.base_url, "api_key": self.api_key, "max_retries": self.max_retries}
        return args | ({} if self.request_timeout is None else {"timeout": self.request_timeout})

    def call_args(self) -> Arguments:
        """Return the arguments of a call: the model and its sampling options."""
        return {"model": self.model, **self.options}


def without_version(url: str) -> str:
    """``http://h:8000/v1`` → ``http://h:8000``."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
