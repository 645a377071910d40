"""One engine over HTTP: an allow-list of three POST paths, JSON in and out, failures as faults."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Required, TypedDict

import aiohttp
import orjson

from insitu.access import engine_door
from insitu.errors import InvalidRequest
from insitu.gateway.engines.sample import GenerateAnswer
from insitu.gateway.shared.faults import (
    PreparationFailed,
    ReplicaBusy,
    ReplicaFailed,
    ReplicaLost,
    VersionMismatch,
    reading,
)
from insitu.gateway.shared.settings import Limits

GENERATE_PATH = "/inference/v1/generate"
_HEADERS = {"content-type": "application/json"}
_SHOWN_CHARS = 500
_KEEP_SECONDS = 3.0
"""Time that an idle connection is kept: less than an engine keeps it, or calls would meet closed ones."""


class _Card(TypedDict, total=False):
    """A model in an engine's own list."""

    id: Required[str]
    parent: str | None
    root: str | None
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as an engine lists it."""

    name: str
    parent: str | None
    """The base model of an adapter."""
    root: str | None
    """The place of the model's files."""
    max_model_len: int | None


_ADAPTERS = b"vllm:lora_requests_info"
"""The metric whose labels are the names of adapters, which are those of runs."""


class Engine:
    """The HTTP client of one replica. Closing it fails the calls under way, which then go elsewhere."""

    def __init__(self, url: str, limits: Limits, key: str = "") -> None:
        self.url = url
        self.has_parser: bool | None = None
        """True if the engine parses tools or reasoning; learned on first use."""
        self.reads_hermes: bool | None = None
        """True if it reads tool calls as the hermes parser does, and no reasoning; learned on first use."""
        self.unseen: dict[int, bool] = {}
        """By token that ended an answer: True if it has no text of its own; learned on first use."""
        self.ends: dict[int, bool] = {}
        """By token: True if a generation stops there; learned on first use, for demonstrations."""
        self._limits = limits
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_seconds),
            auto_decompress=False,
            headers=engine_door.headers(key),
        )

    async def close(self) -> None:
        await self._session.close()

    async def post(self, path: str, body: Mapping[str, object], *, generating: bool = False) -> Any:
        """Return the JSON answer; Fault if another replica may do better, InvalidRequest if none will.

        The answer is the engine's and of no certain shape: read it inside `reading`.
        """
        seconds = self._limits.generate_seconds if generating else self._limits.render_seconds
        try:
            async with self._open(path).post(
                self.url + path, data=orjson.dumps(body), headers=_HEADERS, timeout=self._timeout(seconds)
            ) as answer:
                data = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._lost(path, error) from error
        if answer.status != 200:
            raise self._failure(path, answer.status, data)
        return self._parse(path, data)

    @asynccontextmanager
    async def stream(self, body: Mapping[str, object]) -> AsyncGenerator[AsyncIterator[GenerateAnswer]]:
        """Yield the chunks of a streamed generation. Leaving the block early aborts it in the engine."""
        try:
            async with self._open(GENERATE_PATH).post(
                self.url + GENERATE_PATH,
                data=orjson.dumps(body),
                headers=_HEADERS,
                timeout=self._timeout(self._limits.generate_seconds),
            ) as answer:
                if answer.status != 200:
                    raise self._failure(GENERATE_PATH, answer.status, await answer.read())
                yield self._chunks(answer)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._lost(GENERATE_PATH, error) from error

    async def healthy(self) -> bool:
        """Return True if the engine answers its health check in time."""
        timeout = aiohttp.ClientTimeout(total=self._limits.probe_timeout_seconds)
        try:
            async with self._session.get(self.url + "/health", timeout=timeout) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def models(self) -> list[ServedModel]:
        """Return the models that the engine says it serves."""
        data = await self._get("/v1/models", self._limits.render_seconds)
        with reading():
            return [_served(card) for card in self._parse("/v1/models", data)["data"]]

    async def metrics(self) -> bytes:
        """Return the engine's own metrics for Prometheus, without those that name runs."""
        data = await self._get("/metrics", self._limits.probe_timeout_seconds)
        return b"".join(line for line in data.splitlines(keepends=True) if _ADAPTERS not in line)

    async def _get(self, path: str, seconds: float) -> bytes:
        try:
            async with self._open(path).get(self.url + path, timeout=self._timeout(seconds)) as answer:
                data = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._lost(path, error) from error
        if answer.status != 200:
            raise self._failure(path, answer.status, data)
        return data

    def _open(self, path: str) -> aiohttp.ClientSession:
        """Return the session; ReplicaLost if it was closed under a call, because the engine hung or left."""
        if self._session.closed:
            raise ReplicaLost(f"{self.url}{path}: its connections were closed")
        return self._session

    async def _chunks(self, answer: aiohttp.ClientResponse) -> AsyncIterator[GenerateAnswer]:
        buffer = b""
        async for data in answer.content.iter_any():
            *events, buffer = (buffer + data).split(b"\n\n")
            for event in events:
                payload = event.removeprefix(b"data: ")
                if payload == b"[DONE]":
                    return
                chunk = self._parse(GENERATE_PATH, payload)
                with reading():
                    failed = "error" in chunk
                if failed:
                    raise ReplicaFailed(f"{self.url} ended the stream with {_message(payload)}")
                yield chunk
        raise ReplicaLost(f"{self.url} closed the stream before its end")

    def _timeout(self, seconds: float) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=seconds, sock_connect=self._limits.connect_seconds)

    def _parse(self, path: str, data: bytes) -> Any:
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise ReplicaFailed(f"{self.url}{path} did not answer with JSON: {data[:80]!r}") from error

    def _lost(self, path: str, error: BaseException) -> ReplicaLost:
        return ReplicaLost(f"{self.url}{path}: {type(error).__name__}: {error}")

    def _failure(self, path: str, status: int, data: bytes) -> Exception:
        said = f"{self.url}{path} answered {status}: {_message(data)}"
        if status == 429:
            return ReplicaBusy(said)
        if status == 404:
            # The table promised this model: it was unloaded, or the path needs --enable-scale-out.
            return VersionMismatch(said)
        if status >= 500:
            return ReplicaFailed(said) if path == GENERATE_PATH else PreparationFailed(said)
        return InvalidRequest(f"The engine rejected the request: {_message(data)}")


def _served(card: _Card) -> ServedModel:
    parent, root, length = card.get("parent"), card.get("root"), card.get("max_model_len")
    return ServedModel(
        name=str(card["id"]),
        parent=str(parent) if parent else None,
        root=str(root) if root else None,
        max_model_len=None if length is None else int(length),
    )


def _message(data: bytes) -> str:
    """Return the engine's own words in an error body."""
    try:
        text = str(orjson.loads(data)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        text = data.decode("utf-8", "replace")
    return text[:_SHOWN_CHARS]
