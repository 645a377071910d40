"""A gateway without an engine behind it: answers model calls with text and remembers who made them."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from aiohttp import web

from insitu.wire.headers import ROLLOUT_HEADER

_PATH = re.compile(
    r"(?:rollouts/(?P<rollout>[^/]+)/)?(?:functions/(?P<function>[^/]+)/)?v1/"
    r"(?P<route>models|chat/completions|completions)"
)
_CALLS = re.compile(r"rollouts/(?P<rollout>[^/]+)/calls")

Reply = Callable[[str | None, Mapping[str, object]], str]
"""Returns the text for a call, given its rollout and its body."""


@dataclass(frozen=True, slots=True)
class StandinCall:
    """One model call."""

    rollout_id: str | None
    """None when the call did not say which rollout it belongs to."""
    function: str | None
    body: Mapping[str, object]


class StandinGateway:
    """Listens on a free port of this machine for as long as `async with` is open.

    It counts the calls of a rollout as the real gateway does, but has no tokens to record.
    """

    def __init__(self, reply: Reply, model: str = "standin-run") -> None:
        self.calls: list[StandinCall] = []
        self.num_open = 0
        """Calls currently waiting for their answer."""
        self.answering = asyncio.Event()
        """While it is cleared, calls are accepted but not answered."""
        self.answering.set()
        self.url = ""
        self._open: Counter[str | None] = Counter()
        self._reply = reply
        self._model = model
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        # A client that hangs up ends its call, as in the real gateway.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        self._runner = runner
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if listed := _CALLS.fullmatch(request.match_info["path"]):
            return web.json_response(self._counts(listed["rollout"]))
        found = _PATH.fullmatch(request.match_info["path"])
        if found is None:
            raise web.HTTPNotFound(text=f"the stand-in gateway has no {request.path}")
        if found["route"] == "models":
            return web.json_response({"object": "list", "data": [{"id": self._model, "object": "model"}]})
        rollout_id = found["rollout"] or request.headers.get(ROLLOUT_HEADER)
        body = await request.json()
        self.calls.append(StandinCall(rollout_id, found["function"], body))
        self.num_open += 1
        self._open[rollout_id] += 1
        try:
            await self.answering.wait()
        finally:
            self.num_open -= 1
            self._open[rollout_id] -= 1
        text = self._reply(rollout_id, body)
        if found["route"] == "completions":
            return web.json_response(_answer(body, "text_completion", {"text": text}))
        if body.get("stream"):
            return await _stream(request, _answer(body, "chat.completion.chunk", {"delta": _message(text)}))
        return web.json_response(_answer(body, "chat.completion", {"message": _message(text)}))

    def _counts(self, rollout_id: str) -> dict[str, object]:
        seen, under_way = sum(call.rollout_id == rollout_id for call in self.calls), self._open[rollout_id]
        ended = {"standin": seen - under_way} if seen > under_way else {}
        return {"calls": [], "seen": seen, "unrecorded": ended, "under_way": under_way}


def _message(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _answer(body: Mapping[str, object], kind: str, choice: Mapping[str, object]) -> dict[str, object]:
    return {
        "id": "standin",
        "object": kind,
        "created": 0,
        "model": body.get("model"),
        "choices": [{"index": 0, "finish_reason": "stop", **choice}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


async def _stream(request: web.Request, chunk: Mapping[str, object]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())
    return response
