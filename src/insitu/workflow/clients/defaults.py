"""Adds the options of an entry of `llms` to every call of an SDK's client that lacks them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_NAMES: dict[str, dict[str, str]] = {
    "chat/completions": {},
    "completions": {},
    "responses": {"max_tokens": "max_output_tokens"},
    "messages": {"stop": "stop_sequences"},
}
"""The options' names in each kind of call, where they differ."""


def with_defaults(url: str, body: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Add missing options to the body of a call; leave it unchanged if `url` is not a model call."""
    names = next((names for end, names in _NAMES.items() if url.rstrip("/").endswith(f"/{end}")), None)
    if names is None:
        return dict(body)
    limited = any(name in body for name in _LIMITS)
    defaults = {
        names.get(key, key): value for key, value in options.items() if key not in _LIMITS or not limited
    }
    return defaults | dict(body)


@functools.cache
def with_options(kind: Any, sync: bool) -> Any:
    """Subclass the SDK's client to add options in the SDK's hook, which runs before a request is built."""

    class Client(kind):
        insitu_options: Mapping[str, Any] = {}

        def copy(self, **changes: Any) -> Any:
            copied = super().copy(**changes)
            copied.insitu_options = self.insitu_options
            return copied

        with_options = copy

        def _filled(self, request: Any) -> Any:
            if self.insitu_options and isinstance(request.json_data, Mapping):
                request.json_data = with_defaults(request.url, request.json_data, self.insitu_options)
            return request

    class Sync(Client):
        def _prepare_options(self, options: Any) -> Any:
            return self._filled(super()._prepare_options(options))

    class Async(Client):
        async def _prepare_options(self, options: Any) -> Any:
            return self._filled(await super()._prepare_options(options))

    chosen = Sync if sync else Async
    chosen.__name__ = chosen.__qualname__ = kind.__name__
    return chosen
