"""Adds the options of an entry of `llms` to every call of an SDK's client that lacks them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_NAMES: dict[str, dict[str, str]] = {
    "chat/completions": {},
    "completions": {},
    "responses": {"max_tokens": "max_output_tokens"},
    "messages": {"stop": "stop_sequences"},
}
"""The options' names in each kind of call, where they differ."""


class Request(Protocol):
    """A request before the SDK builds it."""

    url: str
    json_data: object


def with_defaults(url: str, body: Mapping[str, object], options: Mapping[str, object]) -> dict[str, object]:
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
def with_options(kind: Any, sync: bool) -> Callable[..., Any]:
    """Subclass the SDK's client to add options in the SDK's hook, which runs before a request is built.

    The SDK is imported at run time: as a base class, type checkers take `kind` only without a type.
    """

    class Client(kind):
        insitu_options: Mapping[str, object] = {}

        def copy(self, **changes: object) -> object:
            copied = kind.copy(self, **changes)
            copied.insitu_options = self.insitu_options
            return copied

        with_options = copy

        def _filled(self, request: Request) -> Request:
            body = request.json_data
            if self.insitu_options and isinstance(body, Mapping):
                given = cast("Mapping[str, object]", body)
                request.json_data = with_defaults(request.url, given, self.insitu_options)
            return request

    class Sync(Client):
        def _prepare_options(self, options: object) -> Request:
            return self._filled(kind._prepare_options(self, options))

    class Async(Client):
        async def _prepare_options(self, options: object) -> Request:
            return self._filled(await kind._prepare_options(self, options))

    chosen = Sync if sync else Async
    chosen.__name__ = chosen.__qualname__ = kind.__name__
    return chosen
