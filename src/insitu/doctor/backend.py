"""The backend's half of `insitu doctor`: ports, API, key, gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

from insitu.client import InsituClient
from insitu.doctor.finding import Finding, failed, skipped
from insitu.errors import DeadlineExceeded, InsituError
from insitu.gateway_client import GatewayClient
from insitu.harness.interfaces.settings import GATEWAY_PORT
from insitu.system.keys import key_of

_SECONDS = 5.0
_START = "insitu serve --model DIRECTORY_OR_HUB_ID"
Result = TypeVar("Result")


async def check_backend(url: str) -> AsyncIterator[Finding]:
    """Yield findings about the API at this address and its gateway; or, without one, about free ports."""
    host, port = _address(url)
    if not await _listens(host, port):
        if await _listens(host, GATEWAY_PORT):
            said = f"another program listens at {host}:{GATEWAY_PORT}, the gateway's port"
            yield Finding("ports", "failed", detail=said, hint=f"{_START} --gateway-port {GATEWAY_PORT + 1}")
        else:
            yield Finding("ports", "ok", detail=f"{port} and {GATEWAY_PORT} are free at {host}")
        yield skipped("backend", f"nothing listens at {url}; start one: {_START}")
        for name in ("key", "gateway"):
            yield skipped(name, "no backend")
        return
    key = key_of()
    async with InsituClient(url, key) as client:
        try:
            health = await _within(client.health())
        except InsituError as error:
            yield failed(
                "backend", error, hint=f"name the API of a backend: --url, or {_START} --port {port + 1}"
            )
            return
        said = f"insitu {health.version} at {url}: {health.status}"
        if health.status == "ok":
            yield Finding("backend", "ok", detail=said)
        else:
            hint = "look at supervisor.log in the logs of its state directory"
            yield Finding("backend", "failed", detail=f"{said}, {health.ledger}", hint=hint)
        try:
            runs = await _within(client.list_runs())
            yield Finding("key", "ok", detail=f"accepted; {len(runs)} runs")
        except InsituError as error:
            yield failed(
                "key", error, hint="export INSITU_API_KEY=<the key that the backend was started with>"
            )
    if health.gateway_url is None:
        yield skipped("gateway", "the backend has not said yet where its gateway is")
        return
    async with GatewayClient(health.gateway_url, key) as gateway:
        try:
            models = await _within(gateway.models())
            yield Finding(
                "gateway", "ok", detail=f"{health.gateway_url} serves {', '.join(models) or 'no model yet'}"
            )
        except InsituError as error:
            yield failed("gateway", error, hint="look at gateway.log in the state directory")


async def _within(asked: Coroutine[Any, Any, Result]) -> Result:
    try:
        return await asyncio.wait_for(asked, _SECONDS)
    except TimeoutError:
        raise DeadlineExceeded(f"no answer within {_SECONDS:g} s") from None


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or (443 if parts.scheme == "https" else 80)


async def _listens(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), _SECONDS)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
