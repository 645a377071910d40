"""The options of an entry of `llms` in an SDK's client: they go with every call that lacks them."""

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
"""What an option is called in each kind of call."""


def with_defaults(url: str, body: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a call with the options that it lacks; as it is when `url` is no model call."""
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
    """The SDK's client class, with options; the SDK's own hook sees every request before it is built."""

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
