"""A gateway in this process, in front of stand-in engines."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from pydantic import TypeAdapter

from insitu.gateway.app import build_app
from insitu.gateway.connection import Site
from insitu.gateway.shared.settings import Limits, Settings
from insitu.records.store import RecordStore
from insitu.types import ModelCall
from tests.support.standin_engine import Behaviour, StandinEngine
from tests.support.standin_parser import StandinParserEngine, tool_call

API = {"authorization": "Bearer default"}
ADMIN = {"authorization": "Bearer admin"}
LIMITS = Limits(
    hold_seconds=5.0,
    settle_seconds=0.05,
    connect_seconds=1.0,
    generate_seconds=10.0,
    probe_interval_seconds=0.1,
    probe_timeout_seconds=0.3,
    flush_seconds=2.0,
)
MESSAGES = [{"role": "user", "content": "hello"}]


def pytest_collection_finish() -> None:
    gc.freeze()  # half a million objects of imported modules, which every full collection would visit


class GatewayUnderTest:
    """The running gateway, its HTTP client, and the engines behind it."""

    def __init__(
        self, port: int, session: aiohttp.ClientSession, engines: list[StandinEngine], url: str
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.session = session
        self.engines = engines
        self.records_url = url
        self.revision = 0
        self.close: Callable[[], Awaitable[None]]
        """End the gateway before the test does."""

    @property
    def engine(self) -> StandinEngine:
        return self.engines[0]

    def table(self, **changes: Any) -> dict[str, Any]:
        self.revision += 1
        base = {"name": "tiny", "engine_model": "tiny", "version": "base", "refusal": None}
        served = {"0": {"engine_model": "tiny", "version": "base"}}
        table = {
            "epoch": self.revision,
            "hold": None,
            "replicas": [{"id": f"replica-{i}", "url": e.url} for i, e in enumerate(self.engines)],
            "base": base,
            "runs": {"run": {"latest": 0, "served": served}},
        }
        return table | changes

    async def put_table(self, **changes: Any) -> None:
        async with self.session.put(
            f"{self.url}/control/routes", data=orjson.dumps(self.table(**changes)), headers=ADMIN
        ) as answer:
            assert answer.status == 200, await answer.text()

    async def state(self) -> dict[str, Any]:
        async with self.session.get(f"{self.url}/control/state", headers=ADMIN) as answer:
            return await answer.json()

    async def post(
        self, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None, **body: Any
    ) -> tuple[int, dict[str, Any], str]:
        """Status, JSON body and call id of one call."""
        body = {"model": "tiny", "messages": MESSAGES} | body if "chat" in path else {"model": "tiny"} | body
        async with self.session.post(
            self.url + path, data=orjson.dumps(body), headers=API | (headers or {})
        ) as got:
            return got.status, await got.json(), got.headers.get("x-insitu-call-id", "")

    async def stream(
        self, path: str = "/v1/chat/completions", **body: Any
    ) -> tuple[list[dict[str, Any]], str, bool]:
        """The events, the call id, and whether the stream ended with [DONE]."""
        body = {"model": "tiny", "messages": MESSAGES} | body if "chat" in path else {"model": "tiny"} | body
        async with self.session.post(
            self.url + path, data=orjson.dumps(body | {"stream": True}), headers=API
        ) as got:
            assert got.status == 200, await got.text()
            payloads = [e.removeprefix("data: ") for e in (await got.text()).split("\n\n") if e]
            done = payloads[-1] == "[DONE]"
            return [orjson.loads(p) for p in payloads if p != "[DONE]"], got.headers["x-insitu-call-id"], done

    async def records(self) -> list[ModelCall]:
        """All records, after the recorder has written them."""
        await until(lambda: self._written(), "the recorder writes everything")
        return self.stored()

    def stored(self) -> list[ModelCall]:
        """All records that are in the store."""
        store = RecordStore(self.records_url)
        try:
            with store._engine.begin() as connection:
                ids = [row[0] for row in connection.exec_driver_sql("select id from calls order by seq")]
            return store.get(ids)
        finally:
            store.close()

    async def _written(self) -> bool:
        return (await self.state())["record_backlog"] == 0


async def until(condition: Callable[[], Any], what: str, seconds: float = 5.0) -> None:
    """Wait for a condition (plain or async), with a deadline."""
    deadline = time.monotonic() + seconds
    while True:
        result = condition()
        if await result if isinstance(result, Awaitable) else result:
            return
        assert time.monotonic() < deadline, f"waited {seconds} s for: {what}"
        await asyncio.sleep(0.01)


StartGateway = Callable[..., Awaitable[GatewayUnderTest]]


@contextmanager
def in_memory() -> Iterator[Path]:
    """Open a directory in memory if the system has one: a store on disk waits for it 5 times per test."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@asynccontextmanager
async def starting_gateways() -> AsyncIterator[StartGateway]:
    """Start gateways with `num_engines` stand-ins; `limits` override the short ones above.

    Retries and returning replicas pause for a tenth of the usual time.
    """
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("insitu.gateway.calls.pipeline._RETRY_PAUSE_SECONDS", 0.01)
        patch.setattr("insitu.gateway.engines.replicas._FIRST_BACKOFF_SECONDS", 0.025)
        url = f"sqlite:///{stack.enter_context(in_memory())}/calls.db"

        async def start(
            num_engines: int = 1,
            *,
            install: bool = True,
            make_engine: Callable[[], StandinEngine] = lambda: StandinEngine(Behaviour()),
            keys_file: Path | None = None,
            **limits: Any,
        ) -> GatewayUnderTest:
            engines = [await stack.enter_async_context(make_engine()) for _ in range(num_engines)]
            settings = Settings(
                url, "default", "admin", keys_file=keys_file, limits=replace(LIMITS, **limits)
            )
            runner = web.AppRunner(build_app(settings), handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = Site(runner, "127.0.0.1", 0, settings.limits)
            await site.start()
            port = site.port
            timeout = aiohttp.ClientTimeout(total=20)
            session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
            gateway = GatewayUnderTest(port, session, engines, url)
            gateway.close = runner.cleanup
            if install:
                await gateway.put_table()
            return gateway

        yield start


@pytest.fixture
async def start_gateway() -> AsyncIterator[StartGateway]:
    """A function that starts gateways, which end with the test; see `starting_gateways`."""
    async with starting_gateways() as start:
        yield start


@pytest.fixture
async def gateway(start_gateway: StartGateway) -> GatewayUnderTest:
    return await start_gateway()


async def check_definitions(
    start_gateway: StartGateway, url_path: str, asked: dict[str, Any], whole: Any, event: Any
) -> None:
    """Check an answer and the events of a stream against a vendor's own types."""
    said = f"<think>hm</think>So: {tool_call('look', far=True)}"
    gateway = await start_gateway(make_engine=lambda: StandinParserEngine(said))

    async def sent(**body: Any) -> str:
        body = {"model": "tiny"} | asked | body
        async with gateway.session.post(f"{gateway.url}/v1/{url_path}", json=body, headers=API) as got:
            assert got.status == 200, await got.text()
            return await got.text()

    TypeAdapter(whole).validate_json(await sent())
    defined = TypeAdapter(event)
    events = (await sent(stream=True)).split("\n\n")[:-1]
    assert len(events) > 2
    for one in events:
        name, data = one.split("\n")
        defined.validate_json(data.removeprefix("data: "))
        assert orjson.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
