"""Nothing costs much before the key is checked, and nothing waits without a deadline."""

from __future__ import annotations

import asyncio
import gzip
import logging
import time
from unittest.mock import Mock

import pytest

from insitu.json_size import count_values
from insitu.system.connections import Newcomers
from tests.support.raw_connection import closed, connected
from tests.unit.gateway.conftest import API, GatewayUnderTest, StartGateway, until

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n"
KEY = b"Authorization: Bearer default\r\n"


def port_of(gateway: GatewayUnderTest) -> int:
    return int(gateway.url.rpartition(":")[2])


async def test_a_compressed_body_is_refused_and_never_inflated(
    gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inflating(*_: object) -> None:
        raise AssertionError("a body was inflated")

    monkeypatch.setattr("aiohttp.http_parser.DeflateBuffer.__init__", inflating)
    bomb = gzip.compress(b" " * 2**20)
    for headers, status in (({}, 401), (API, 400)):
        async with gateway.session.post(
            f"{gateway.url}/v1/chat/completions", data=bomb, headers={"content-encoding": "gzip", **headers}
        ) as got:
            assert got.status == status
            assert status == 401 or "Compressed" in (await got.json())["error"]["message"]


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "]", "null", "http://\x80"])
async def test_an_origin_that_is_no_address_is_refused_quietly(
    gateway: GatewayUnderTest, origin: str, caplog: pytest.LogCaptureFixture
) -> None:
    head = POST + b"Origin: " + origin.encode("latin-1") + b"\r\nContent-Length: 0\r\n\r\n"
    async with connected(port_of(gateway), head) as (reader, _):
        assert (await reader.readline()).split()[1] == b"400"
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("host", ["[", "[::1", "[v1]", "\x80"])
async def test_a_host_that_is_no_address_is_refused_quietly(
    gateway: GatewayUnderTest, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"GET /v1/models HTTP/1.1\r\nHost: " + host.encode("latin-1") + b"\r\n\r\n"
    async with connected(port_of(gateway), head) as (reader, _):
        assert (await reader.readline()).split()[1] == b"400"
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "bytes_sent",
    [b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", POST + b"A:" + b"a" * 9000 + b"\r\n\r\n"],
)
async def test_bytes_that_are_not_http_leave_no_line_in_the_log(
    gateway: GatewayUnderTest, bytes_sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(port_of(gateway), bytes_sent + b"\r\n\r\n") as (reader, _):
        assert (await closed(reader, 5)).split()[1] == b"400"
    assert not [r for r in caplog.records if r.levelno >= logging.INFO]


async def test_headers_are_bounded_in_bytes(gateway: GatewayUnderTest) -> None:
    for size, statuses in ((1_000, {b"200"}), (100_000, {b"400", b"431"})):  # by the parser, or before it
        long = b"X-Long: " + b"x" * size + b"\r\n\r\n"
        async with connected(port_of(gateway), GET + KEY + long) as (reader, _):
            assert (await reader.readline()).split()[1] in statuses


async def test_a_flood_without_a_key_is_not_parsed(
    gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.access.strangers.PACE", 0.0)  # all within the same second, on any machine
    keyless = POST + b"Content-Length: 0\r\n\r\n"
    for _ in range(100):
        async with connected(port_of(gateway), keyless + keyless) as (reader, _):
            answer = await closed(reader, 3)
            assert answer.count(b"HTTP/1.1 401") == 1, "its next request would be judged again"
    assert b"WWW-Authenticate: Bearer\r\nConnection: close" in answer, "the one without the parser"
    assert (await gateway.post())[0] == 200
    async with connected(port_of(gateway), b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") as (reader, _):
        assert b" 200 " in await reader.readline()
    async with gateway.session.get(f"{gateway.url}/metrics", headers=API) as got:
        rejected = 'insitu_gateway_rejections_total{reason="unparsed"} '
        [line] = [line for line in (await got.text()).splitlines() if line.startswith(rejected)]
        assert float(line.removeprefix(rejected)) >= 60


HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.mark.parametrize("path", [b"/health", b"/ready"])
async def test_a_flood_of_an_open_route_is_not_parsed(
    gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch, path: bytes
) -> None:
    monkeypatch.setattr("insitu.access.strangers.PACE", 0.0)  # all within the same second, on any machine
    asked = b"GET " + path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    statuses: list[bytes] = []
    for _ in range(60):
        async with connected(port_of(gateway), asked + b"\r\n") as (reader, _):
            statuses.append((await closed(reader, 3)).split()[1])
    assert statuses == [b"200"] * 40 + [b"429"] * 20
    assert (await gateway.post())[0] == 200
    async with connected(port_of(gateway), asked + KEY + b"\r\n") as (reader, _):
        assert b" 200 " in await reader.readline(), "a probe with a key"


async def test_an_answer_without_a_key_ends_its_connection(gateway: GatewayUnderTest) -> None:
    """Otherwise what follows an open route would come in without being judged."""
    async with connected(port_of(gateway), HEALTH + b"\r\n" + HEALTH + b"\r\n") as (reader, _):
        assert (await closed(reader, 3)).count(b"HTTP/1.1 200") == 1
    sent = GET + KEY + b"\r\n" + HEALTH + b"\r\n" + GET + KEY + b"Connection: close\r\n\r\n"
    async with connected(port_of(gateway), sent) as (reader, _):
        assert (await closed(reader, 3)).count(b"HTTP/1.1 200") == 3, "this one has shown a key"


async def test_half_sent_headers_have_a_deadline(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(head_seconds=0.2)
    for sent in (b"", POST, POST + KEY):
        async with connected(port_of(gateway), sent) as (reader, _):
            assert await closed(reader, 3) == b""


async def test_a_refused_body_that_trickles_in_does_not_keep_the_connection(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.gateway.connection._LINGER_SECONDS", 0.2)
    gateway = await start_gateway(head_seconds=0.3)
    async with connected(port_of(gateway), POST + b"Content-Length: 1000\r\n\r\n") as (reader, writer):
        trickle = asyncio.create_task(trickled(writer))
        assert b" 401 " in await reader.readline()
        await closed(reader, 5)
        trickle.cancel()


async def trickled(writer: asyncio.StreamWriter) -> None:
    while not writer.is_closing():
        writer.write(b"x")
        await asyncio.sleep(0.05)


async def test_a_client_with_a_key_may_finish_a_rejected_body(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may read only then; a connection that is closed before would cost it the answer."""
    monkeypatch.setattr("insitu.gateway.connection._LINGER_SECONDS", 0.1)
    gateway = await start_gateway()
    head = b"Content-Encoding: gzip\r\nContent-Length: 100\r\n\r\n"
    async with connected(port_of(gateway), POST + KEY + head) as (reader, _):
        assert b" 400 " in await reader.readline()
        assert len(await reader.read(2**16)) > 0  # the rest of the answer
        await asyncio.sleep(0.5)
        assert not reader.at_eof(), "the gateway still reads"


async def test_bodies_that_arrive_count_as_calls(start_gateway: StartGateway) -> None:
    """Otherwise any number of bodies would be read for the last place, and all but one rejected."""
    gateway = await start_gateway(max_calls=2)
    half = POST + KEY + b"Content-Length: 100\r\n\r\n{"
    async with connected(port_of(gateway), half), connected(port_of(gateway), half):
        await asyncio.sleep(0.2)
        status, body, _ = await gateway.post()
        assert (status, body["error"]["type"]) == (429, "Overloaded")
    await asyncio.sleep(0.2)
    assert (await gateway.post())[0] == 200


async def test_a_connection_may_rest_between_calls_but_not_for_long(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(head_seconds=0.5, idle_seconds=1.5)
    request = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n" + KEY + b"\r\n"
    async with connected(port_of(gateway), request) as (reader, writer):
        await asyncio.sleep(0.8)  # beyond the deadline for newcomers
        writer.write(request)
        await asyncio.sleep(0.1)
        writer.write(POST)  # half of a third request
        answers = await closed(reader, 5)
        assert answers.count(b"HTTP/1.1 200") == 2


async def test_silent_connections_push_out_their_own(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(max_newcomers=20, head_seconds=30)
    crowd = [connected(port_of(gateway), POST) for _ in range(100)]
    pairs = [await one.__aenter__() for one in crowd]
    try:
        for _ in range(5):
            status, _, _ = await gateway.post()
            assert status == 200
        ended = [asyncio.create_task(closed(reader, 3)) for reader, _ in pairs[:80]]
        assert await asyncio.gather(*ended) == [b""] * 80
        assert not pairs[-1][0].at_eof()
    finally:
        for one in crowd:
            await one.__aexit__(None, None, None)


def test_all_connections_together_are_bounded() -> None:
    """Those that have shown a key count too, and stay; the next newcomer goes."""
    bounds = Newcomers(max_newcomers=10, max_connections=2)
    first, second, newest = connections = [Mock(), Mock(), Mock()]
    for connection in connections[:2]:
        bounds.arrived(connection)
        bounds.known(connection)
    bounds.arrived(newest)
    assert [connection.drop.called for connection in connections] == [False, False, True]
    for connection in (newest, first):
        bounds.left(connection)
    bounds.arrived(another := Mock())
    assert not another.drop.called
    assert not second.drop.called


async def test_a_body_that_stalls_is_a_408(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(body_seconds=0.2)
    async with connected(port_of(gateway), POST + KEY + b"Content-Length: 100\r\n\r\n{") as (reader, _):
        answer = await closed(reader, 5)
        assert answer.split()[1] == b"408"
        assert b"1 bytes did" in answer


async def test_bodies_under_way_are_bounded_in_bytes(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(max_bodies_bytes=50_000)
    gateway.engine.behaviour.gate = asyncio.Event()
    messages = [{"role": "user", "content": "x" * 20_000}]
    calls = [asyncio.create_task(gateway.post(messages=messages)) for _ in range(4)]
    done, waiting = await asyncio.wait(calls, timeout=5, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0.2)
    statuses = [call.result()[0] for call in calls if call.done()]
    assert statuses == [429, 429]
    gateway.engine.behaviour.gate.set()
    assert [(await call)[0] for call in waiting if call not in done].count(200) == 2
    assert (await gateway.post(messages=messages))[0] == 200, "the budget is free again"


async def test_a_body_of_a_million_values_is_refused_before_it_is_parsed(gateway: GatewayUnderTest) -> None:
    body = b'{"model": "tiny", "messages": [' + b"[]," * 2_500_000 + b"[]]}"
    started = time.monotonic()
    async with gateway.session.post(f"{gateway.url}/v1/chat/completions", data=body, headers=API) as got:
        assert (got.status, (await got.json())["error"]["type"]) == (413, "TooLarge")
    assert time.monotonic() - started < 2


def test_a_budget_counts_what_is_parsed() -> None:
    assert count_values(b'{"a": [1, 2, {}]}', 10) == 6


async def test_a_stalled_reader_frees_its_call(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(write_seconds=0.3)
    behaviour = gateway.engine.behaviour
    behaviour.num_tokens, behaviour.answer_bytes, behaviour.chunk_seconds = 64, 64 * 2**20, 0.01
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": true}'
    head = b"Content-Length: %d\r\n\r\n" % len(body)
    async with connected(port_of(gateway), POST + KEY + head + body) as (reader, writer):
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()

        async def free() -> bool:
            state = await gateway.state()
            return state["in_flight_total"] == 0 and state["recorded"] + state["record_backlog"] > 0

        await until(free, "the call ends although nobody reads it", 8)
        del reader
    [call] = await gateway.records()
    assert call.finish_reason == "cancelled"


async def test_an_answer_that_nobody_reads_loses_its_connection(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(write_seconds=0.3)
    gateway.engine.behaviour.answer_bytes = 16 * 2**20
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}]}'
    head = b"Content-Length: %d\r\n\r\n" % len(body)
    async with connected(port_of(gateway), POST + KEY + head + body) as (reader, writer):
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        await asyncio.sleep(2.5)
        transport.resume_reading()
        try:
            async with asyncio.timeout(30):
                got = await reader.read()
        except ConnectionResetError:
            got = b""
        assert len(got) < 16 * 2**20
