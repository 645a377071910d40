"""A pass-through between gateway and engine that writes down what the engine was given and what it returned.

It is the second source of every exactness test: nothing of it goes through the gateway's own parsing. It
also gives each model name a chat template of its own, so that one engine speaks many dialects::

    agent → gateway → witness (template of the model's name into render; log of generate) → vLLM
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

_RENDER, _GENERATE = "/v1/chat/completions/render", "/inference/v1/generate"
_HOP_HEADERS = {"content-type"}


@dataclass(frozen=True, slots=True)
class Witnessed:
    """One generation as it passed by."""

    call_id: str
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class Witness:
    """`url` stands for the engine; `calls` is what was generated, by call id."""

    engine_url: str
    templates: dict[str, str]
    """Model name → chat template."""
    url: str = ""
    calls: dict[str, Witnessed] = field(default_factory=dict[str, Witnessed])
    rendered: list[list[int]] = field(default_factory=list[list[int]])
    """Every prompt that the engine rendered."""
    _session: aiohttp.ClientSession | None = None

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        data = await request.read()
        body: dict[str, Any] = json.loads(data) if data else {}
        if request.path == _RENDER:
            data = json.dumps(body | {"chat_template": self.templates[body["model"]]}).encode()
        headers = {k: v for k, v in request.headers.items() if k.lower() in _HOP_HEADERS}
        async with self._session.request(
            request.method, self.engine_url + request.path_qs, data=data or None, headers=headers
        ) as got:
            answer = web.StreamResponse(status=got.status, headers={"content-type": got.content_type})
            await answer.prepare(request)
            seen = b""
            async for part in got.content.iter_any():
                seen += part
                await answer.write(part)
            if request.path == _GENERATE and got.status == 200:
                self._note(body, seen)
            if request.path == _RENDER and got.status == 200:
                self.rendered.append(json.loads(seen)["token_ids"])
            with suppress(ConnectionResetError):  # the gateway leaves at the last event of a stream
                await answer.write_eof()
        return answer

    def _note(self, body: dict[str, Any], seen: bytes) -> None:
        call = body["request_id"]
        assert call not in self.calls, f"{call} was generated twice"
        output_ids: list[int] = []
        logprobs: list[float] = []
        for answer in _answers(seen):
            for choice in answer["choices"]:
                output_ids += choice["token_ids"] or []
                if choice["logprobs"]:
                    logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]
        self.calls[call] = Witnessed(call, body["token_ids"], output_ids, logprobs)


def _answers(seen: bytes) -> list[dict[str, Any]]:
    """The JSON objects of a whole or a streamed answer."""
    if not seen.startswith(b"data: "):
        return [json.loads(seen)]
    events = [event.removeprefix(b"data: ") for event in seen.split(b"\n\n")]
    return [json.loads(event) for event in events if event.startswith(b"{")]


@asynccontextmanager
async def witness(engine_url: str, templates: dict[str, str], port: int) -> AsyncIterator[Witness]:
    """Listen on loopback until the block ends."""
    watching = Witness(engine_url, templates, f"http://127.0.0.1:{port}")
    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_route("*", "/{path:.*}", watching._pass)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    timeout = aiohttp.ClientTimeout(total=300)
    # shorter than the engine keeps connections open, so that none is reused while it closes
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        watching._session = session
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            yield watching
        finally:
            await runner.cleanup()
