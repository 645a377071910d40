"""A stand-in between gateway and a real vLLM: answers are what a test wrote, all else is the real engine's.

A random model never writes a tool call. Here its tokens come from the test, and vLLM renders and parses them.
"""

from __future__ import annotations

from typing import Any

import aiohttp
from aiohttp import web

from tests.support.standin_engine import Behaviour, StandinEngine


class ReplayingEngine(StandinEngine):
    """Samples `output`; passes all other requests on to `upstream`."""

    def __init__(self, upstream: str) -> None:
        super().__init__(Behaviour(weight_version="default", keeps_interval=True))
        self.output: list[int] = []
        self._upstream = upstream

    def _sampled(self, body: dict[str, Any]) -> tuple[list[int], str]:
        return list(self.output), "stop"

    async def _passed_on(self, request: web.Request) -> web.Response:
        data = None if request.method == "GET" else await self._body(request)
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, self._upstream + request.path, json=data) as got,
        ):
            return web.Response(status=got.status, body=await got.read(), content_type="application/json")

    _models = _render_chat = _derender_chat = _render_completion = _derender_completion = _passed_on  # type: ignore[assignment]
