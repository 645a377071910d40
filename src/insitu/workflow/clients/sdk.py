"""Shared by clients on the OpenAI and Anthropic SDKs: arguments, and HTTP clients that mark calls.

Every request is marked with its rollout and function at the moment it is sent. The address names the rollout
too, so if one rollout uses an LLM object made by another, the gateway rejects the call instead of recording
it under the wrong rollout.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from types import ModuleType
from typing import Any, Protocol, cast

from insitu.workflow.clients.defaults import with_options
from insitu.workflow.context import current_rollout, rollout_or_none
from insitu.workflow.llm import LLMSettings


class Request(Protocol):
    """A request that is about to be sent."""

    @property
    def headers(self) -> MutableMapping[str, str]: ...


def sdk_client(
    kind: type[object], sdk: ModuleType, settings: LLMSettings, *, sync: bool = False, **options: object
) -> object:
    """Create a client of the SDK's class `kind` that adds the entry's options to calls that lack them."""
    client = with_options(kind, sync)(**sdk_args(sdk, settings, sync=sync) | options)
    client.insitu_options = dict(settings.options)
    return client


def sdk_args(sdk: ModuleType, settings: LLMSettings, *, sync: bool = False) -> dict[str, object]:
    """Return arguments for an SDK's client class; the address is the rollout's, without a function."""
    args: dict[str, object] = {
        "base_url": settings.rollout_url,
        "api_key": settings.api_key,
        "max_retries": settings.max_retries,
        "default_headers": dict(settings.headers),
        "http_client": http_client(sdk, settings, sync=sync),
    }
    return args | ({} if settings.request_timeout is None else {"timeout": settings.request_timeout})


def http_client(sdk: ModuleType, settings: LLMSettings, *, sync: bool = False) -> object:
    """Return the SDK's kind of HTTP client: shared by the rollout's LLM objects and closed at its end."""
    context, marks = current_rollout(), bool(settings.headers)
    if sync:
        return context.kept((sdk.__name__, "sync", marks), lambda: _opened(sdk, marks, sync=True))
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # a thread, where each call may run in its own loop
        return loose_http_client(sdk, settings)
    return context.kept((sdk.__name__, id(loop), marks), lambda: _opened(sdk, marks, sync=False))


def loose_http_client(sdk: ModuleType, settings: LLMSettings) -> object:
    """Return an async HTTP client without idle connections, because calls may come from different loops."""
    limits = importlib.import_module(_httpx_of(sdk.DefaultAsyncHttpxClient)).Limits(
        max_keepalive_connections=0
    )
    return _opened(sdk, bool(settings.headers), sync=False, limits=limits)


def mark(request: Request) -> None:
    """Add the rollout's headers; outside a rollout (a thread without its context) keep the object's own."""
    context = rollout_or_none()
    if context is not None:
        request.headers.update(context.headers)


def call_options(create: Callable[..., object], settings: LLMSettings) -> dict[str, object]:
    """Return the entry's options as arguments of an SDK's `create`, unknown ones in `extra_body`."""
    known = inspect.signature(create).parameters
    named: dict[str, object] = {key: value for key, value in settings.options.items() if key in known}
    more: dict[str, object] = {key: value for key, value in settings.options.items() if key not in known}
    if more:
        named["extra_body"] = {**more, **cast("Mapping[str, object]", named.get("extra_body", {}))}
    return named


def _opened(sdk: ModuleType, marks: bool, *, sync: bool, **more: object) -> object:
    base = sdk.DefaultHttpxClient if sync else sdk.DefaultAsyncHttpxClient
    hook = mark if sync else _mark_async
    hooks = {"event_hooks": {"request": [hook]}} if marks else {}
    client = _staying_open(base, sync)(verify=_tls(_httpx_of(base)), **hooks, **more)
    current_rollout().on_end(functools.partial(_close if sync else _close_async, base, client))
    return client


async def _mark_async(request: Request) -> None:
    mark(request)


@functools.cache
def _staying_open(base: Any, sync: bool) -> Callable[..., object]:
    """Return an HTTP client class that ignores `close`, so that closing one SDK client spares the others."""

    class Sync(base):
        def close(self) -> None: ...

    class Async(base):
        async def aclose(self) -> None: ...

    return Sync if sync else Async


def _close(base: Any, client: object) -> None:
    base.close(client)


async def _close_async(base: Any, client: object) -> None:
    try:
        await base.aclose(client)
    except RuntimeError as error:
        if "closed" not in str(error):  # its event loop has ended, and its connections with it
            raise


def _httpx_of(base: type[object]) -> str:
    """Return `httpx` or `httpx2`, whichever the SDK is built on."""
    return next(name for kind in base.__mro__ if (name := kind.__module__.split(".")[0]).startswith("httpx"))


@functools.cache
def _tls(httpx: str) -> object:
    """Create the TLS context once: loading certificates takes longer than the rest of making a client."""
    return importlib.import_module(httpx).create_ssl_context()
