"""What comes in is bounded: numbers, pace, connections. Nothing of it is work for others."""

from __future__ import annotations

import asyncio
import gzip
import re
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from insitu.access.key_changes import create_key
from insitu.access.scopes import Scope
from insitu.backend.api.settings import ApiSettings, Limits
from insitu.backend.http.app import build_api
from insitu.backend.http.process import server_config
from insitu.backend.ledger import Ledger
from insitu.records.store import RecordStore
from insitu.types import LoraSettings
from tests.support.raw_connection import closed, connected

from .conftest import KEY, LIMITS, inline_call, inline_group, ndjson, put, submit

HEAD = b"HTTP/1.1\r\nHost: 127.0.0.1\r\n"
AUTHORIZED = b"Authorization: Bearer " + KEY.encode() + b"\r\n"
UPLOAD = AUTHORIZED + b"Content-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"


def group_with(reward: Any = 1.0, **call: Any) -> bytes:
    head = {"rollout_id": "r", "reward": reward, "num_inline_calls": 1}
    return ndjson({"group": {"num_trajectories": 1}}, {"trajectory": head}, inline_call(**call))


@pytest.mark.parametrize("reward", [1e200, -1e10, 1e9 + 1])
async def test_a_reward_beyond_all_bounds_is_refused(http: httpx.AsyncClient, reward: float) -> None:
    answer = await put(http, "g", group_with(reward))
    assert answer.status_code == 400
    assert "reward" in answer.json()["error"]["message"]


@pytest.mark.parametrize("field", [{"policy_step": 2**63}, {"policy_step": 2**31}, {"prompt_ids": [2**31]}])
async def test_a_number_that_no_column_holds_is_refused(
    http: httpx.AsyncClient, field: dict[str, Any]
) -> None:
    answer = await put(http, "g", group_with(**field))
    assert answer.status_code == 400
    assert next(iter(field)) in answer.json()["error"]["message"]


@pytest.mark.parametrize("argument", [2**31, 2**63, -(2**40), "x" * 2000])
async def test_an_argument_of_a_run_is_bounded(http: httpx.AsyncClient, argument: Any) -> None:
    body = {"name": "big", "base_model": "m", "engine_args": {"max_num_seqs": argument}}
    assert (await http.post("/v1/runs", json=body)).status_code == 400


async def test_a_step_over_the_same_group_20000_times_is_refused_at_once(http: httpx.AsyncClient) -> None:
    for groups in (["g"] * 7000, [f"g{n // 2}" for n in range(7000)]):
        started = time.monotonic()
        answer = await submit(http, "k", groups)
        assert answer.status_code == 400
        assert "named twice" in answer.json()["error"]["message"]
        assert time.monotonic() - started < 2
        assert len(answer.content) < 4000


async def test_a_compressed_body_is_refused(http: httpx.AsyncClient, stranger: httpx.AsyncClient) -> None:
    for client, status in ((stranger, 401), (http, 400)):
        answer = await client.post(
            "/v1/runs", content=gzip.compress(b"{}"), headers={"content-encoding": "gzip"}
        )
        assert answer.status_code == status
    assert "compressed bodies are not accepted" in answer.text


@asynccontextmanager
async def serving(folder: Path, ledger: Ledger, records: RecordStore, **limits: Any) -> AsyncIterator[int]:
    """The API behind a real socket; yield its port."""
    settings = replace(ApiSettings.with_key(folder, KEY), limits=replace(LIMITS, **limits))
    app = build_api(settings, ledger=ledger, records=records)
    config = server_config(app, settings.limits, None, behind_proxy=False)
    config.timeout_keep_alive = 1
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        task = asyncio.create_task(server.serve([listener]))
        try:
            async with asyncio.timeout(30):
                while not server.started:
                    await asyncio.sleep(0.01)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = server.force_exit = True
            await task


async def registered(port: int) -> int:
    async with httpx.AsyncClient() as client:
        headers = {"authorization": f"Bearer {KEY}"}
        return (await client.get(f"http://127.0.0.1:{port}/v1/runs", headers=headers)).status_code


async def test_headers_are_bounded_in_bytes(tmp_path: Path, ledger: Ledger, records: RecordStore) -> None:
    async with serving(tmp_path, ledger, records) as port:
        for size, taken in ((1_000, True), (50_000, False), (1_000_000, False)):
            long = b"X-Long: " + b"x" * size + b"\r\n\r\n"
            async with connected(port, b"GET /v1/runs " + HEAD + AUTHORIZED + long) as (reader, _):
                try:
                    line = await reader.readline()
                except ConnectionResetError:  # closed with the rest of the header unread
                    line = b""
            assert line.startswith(b"HTTP/1.1 200") == taken


async def test_headers_are_bounded_however_they_arrive(http: httpx.AsyncClient) -> None:
    for size, status in ((1_000, 200), (50_000, 400)):
        answer = await http.get("/v1/runs", headers={"x-long": "x" * size})
        assert answer.status_code == status


async def test_twenty_thousand_headers_are_rejected_before_they_are_parsed(
    tmp_path: Path, ledger: Ledger, records: RecordStore
) -> None:
    """Parsing them takes 0.1 s of the event loop, and nobody has shown a key yet."""
    many = b"".join(b"X-%d: y\r\n" % number for number in range(20_000))
    async with serving(tmp_path, ledger, records) as port:
        async with connected(port, b"GET /v1/runs " + HEAD + many + b"\r\n") as (reader, _):
            answer = await closed(reader, 5)
        # Unparsed, or if it came in small parts, by h11.
        assert b" 431 " in answer or b"Invalid HTTP request" in answer
        assert await registered(port) == 200


async def test_a_flood_without_a_key_is_not_parsed(
    tmp_path: Path, ledger: Ledger, records: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.access.strangers.PACE", 0.0)  # all within the same second, on any machine
    async with serving(tmp_path, ledger, records) as port:
        keyless = b"GET /v1/runs " + HEAD + b"\r\n"
        for _ in range(100):
            async with connected(port, keyless + keyless) as (reader, _):
                answer = await closed(reader, 3)
                assert answer.count(b"HTTP/1.1 401") == 1, "its next request would be judged again"
        assert b"WWW-Authenticate: Bearer\r\nConnection: close" in answer, "the one without the parser"
        assert await registered(port) == 200
        async with connected(port, b"GET /health " + HEAD + b"\r\n") as (reader, _):
            assert b" 200 " in await reader.readline()


@pytest.mark.parametrize("path", [b"/health", b"/ready", b"/", b"/app.js"])
async def test_a_flood_of_an_open_route_is_not_parsed(
    tmp_path: Path, ledger: Ledger, records: RecordStore, monkeypatch: pytest.MonkeyPatch, path: bytes
) -> None:
    monkeypatch.setattr("insitu.access.strangers.PACE", 0.0)  # all within the same second, on any machine
    asked = b"GET " + path + b" " + HEAD
    async with serving(tmp_path, ledger, records) as port:
        statuses: list[bytes] = []
        for _ in range(50):
            async with connected(port, asked + b"\r\n") as (reader, _):
                statuses.append((await closed(reader, 3)).split()[1])
        assert b"429" not in statuses[:40]
        assert statuses[40:] == [b"429"] * 10
        assert await registered(port) == 200
        async with connected(port, asked + AUTHORIZED + b"\r\n") as (reader, _):
            assert b" 429 " not in await reader.readline(), "a probe with a key"


async def test_an_answer_without_a_key_ends_its_connection(
    tmp_path: Path, ledger: Ledger, records: RecordStore
) -> None:
    """Otherwise what follows an open route would come in without being judged."""
    health = b"GET /health " + HEAD + b"\r\n"
    async with serving(tmp_path, ledger, records) as port:
        async with connected(port, health + health) as (reader, _):
            answer = await closed(reader, 3)
    assert answer.count(b"HTTP/1.1 200") == 1
    assert b"connection: close" in answer.lower()


async def test_a_session_passes_a_flood_and_a_login_does_not(
    tmp_path: Path, ledger: Ledger, records: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logins are among the requests without a key: beyond the pace they are not parsed."""
    monkeypatch.setattr("insitu.access.strangers.PACE", 0.0)
    body = b'{"key":"' + KEY.encode() + b'"}'
    head = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    login = b"POST /login " + HEAD + head + body
    async with serving(tmp_path, ledger, records) as port:
        async with connected(port, login) as (reader, _):
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        found = re.search(rb"set-cookie: (insitu_session_\d+=[\w-]+);", answer)
        assert found, answer
        for _ in range(60):
            async with connected(port, b"GET /v1/runs " + HEAD + b"\r\n") as (reader, _):
                assert b" 401 " in await closed(reader, 3)
        page = b"GET /v1/runs " + HEAD + b"Cookie: a=b; " + found[1] + b"\r\n\r\n"
        async with connected(port, page) as (reader, _):
            assert b" 200 " in await reader.readline()
        async with connected(port, page.replace(found[1], found[1] + b"x")) as (reader, _):
            assert b" 401 " in await closed(reader, 3)
        async with connected(port, login) as (reader, _):
            assert b" 401 " in await closed(reader, 3)
        async with connected(port, b"GET / " + HEAD + b"\r\n") as (reader, _):
            assert b" 200 " in await reader.readline()


async def test_half_sent_headers_have_a_deadline(
    tmp_path: Path, ledger: Ledger, records: RecordStore
) -> None:
    async with serving(tmp_path, ledger, records, head_seconds=0.3) as port:
        for sent in (b"", b"GET /v1/runs " + HEAD, b"GET /v1/runs " + HEAD + AUTHORIZED):
            async with connected(port, sent) as (reader, _):
                assert await closed(reader, 3) == b""
        whole = b"GET /v1/runs " + HEAD + AUTHORIZED + b"\r\n"
        async with connected(port, whole) as (reader, writer):
            await asyncio.sleep(0.1)
            writer.write(whole + b"GET /v1/runs ")  # a second request, and half of a third
            assert (await closed(reader, 3)).count(b"HTTP/1.1 200") == 2


async def test_a_refused_client_does_not_keep_its_connection(
    tmp_path: Path, ledger: Ledger, records: RecordStore
) -> None:
    async with serving(tmp_path, ledger, records, head_seconds=0.3) as port:
        head = b"POST /v1/runs " + HEAD + b"Content-Length: 1000\r\n\r\n"
        async with connected(port, head) as (reader, writer):
            assert b" 401 " in await reader.readline()
            started = time.monotonic()
            while not reader.at_eof() and time.monotonic() - started < 3:
                writer.write(b"x")
                await asyncio.sleep(0.05)
                if writer.transport.is_closing():
                    break
            assert time.monotonic() - started < 2


async def test_silent_connections_push_out_their_own(
    tmp_path: Path, ledger: Ledger, records: RecordStore
) -> None:
    async with serving(tmp_path, ledger, records, max_newcomers=20, head_seconds=30) as port:
        crowd = [connected(port, b"GET /v1/runs " + HEAD) for _ in range(100)]
        pairs = [await one.__aenter__() for one in crowd]
        try:
            assert await registered(port) == 200
            ended = [asyncio.create_task(closed(reader, 3)) for reader, _ in pairs[:80]]
            assert await asyncio.gather(*ended) == [b""] * 80
        finally:
            for one in crowd:
                await one.__aexit__(None, None, None)


async def test_uploads_that_trickle_give_up_their_place(
    tmp_path: Path, ledger: Ledger, records: RecordStore
) -> None:
    limits = {"max_uploads": 2, "body_seconds": 0.5, "upload_wait_seconds": 3.0}
    async with serving(tmp_path, ledger, records, **limits) as port:
        crowd = [connected(port, b"PUT /v1/runs/run/groups/g%d " % n + HEAD + UPLOAD) for n in range(2)]
        pairs = [await one.__aenter__() for one in crowd]
        trickles = [asyncio.create_task(_trickle(writer)) for _, writer in pairs]
        try:
            await asyncio.sleep(0.2)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                client.headers["authorization"] = f"Bearer {KEY}"
                assert (await put(client, "honest", inline_group("h"))).status_code == 201
            lines = [await reader.readline() for reader, _ in pairs]
            assert [line.split()[1] for line in lines] == [b"408", b"408"]
        finally:
            for trickle in trickles:
                trickle.cancel()
            for one in crowd:
                await one.__aexit__(None, None, None)


async def test_slow_uploads_of_one_key_leave_places_for_others(
    tmp_path: Path, ledger: Ledger, records: RecordStore
) -> None:
    for project in ("a", "b"):
        ledger.register_run(project, f"{project}~run", "model", LoraSettings(), {}, {"max_seq_length": 100})
    slow, honest = (create_key(tmp_path, name, [Scope.SUBMIT], project=name)[0] for name in ("a", "b"))
    head = b"HTTP/1.1\r\nHost: 127.0.0.1\r\n" + UPLOAD.replace(KEY.encode(), slow.encode())
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(
            serving(tmp_path, ledger, records, max_uploads=8, upload_wait_seconds=1.0)
        )
        for n in range(16):
            await stack.enter_async_context(connected(port, b"PUT /v1/runs/run/groups/g%d " % n + head))
        await asyncio.sleep(0.3)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}"))
        client.headers["authorization"] = f"Bearer {honest}"
        statuses = [(await put(client, f"h{n}", inline_group(f"h{n}"))).status_code for n in range(10)]
        assert statuses == [201] * 10


async def _trickle(writer: asyncio.StreamWriter) -> None:
    while not writer.is_closing():
        writer.write(b"1\r\n{\r\n")
        await asyncio.sleep(0.1)


async def test_an_upload_does_not_wait_for_its_turn_for_ever(
    tmp_path: Path, ledger: Ledger, records: RecordStore
) -> None:
    limits = {"max_uploads": 1, "body_seconds": 5.0, "upload_wait_seconds": 0.2}
    async with serving(tmp_path, ledger, records, **limits) as port:
        async with connected(port, b"PUT /v1/runs/run/groups/g " + HEAD + UPLOAD):
            await asyncio.sleep(0.1)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                client.headers["authorization"] = f"Bearer {KEY}"
                answer = await put(client, "honest", inline_group("h"))
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


def test_honest_clients_are_not_too_slow() -> None:
    """A gibibyte at 100 KB/s is three hours, and still within the limits."""
    limits = Limits()
    assert limits.body_seconds + limits.max_group_bytes / limits.min_body_rate > limits.max_group_bytes / 1e5


async def test_a_rejected_upload_leaves_nothing(http: httpx.AsyncClient, records: RecordStore) -> None:
    whole = inline_group("keeps", 3)
    lines = whole.splitlines(keepends=True)
    broken = [
        b"".join(lines[:-1]),  # cut off
        whole + lines[-1],  # a line too many
        whole.replace(b'"reward":2.0', b'"reward":1e200'),  # of its last rollout
    ]
    for number, body in enumerate(broken):
        assert (await put(http, f"g{number}", body)).status_code == 400
        assert records.count() == 0
    assert (await put(http, "g", whole)).status_code == 201
    assert records.count() == 3
    assert (await put(http, "other", whole)).status_code == 409, "its rollouts are in a group"
    assert (await put(http, "g", inline_group("another", 3))).status_code == 409
    assert records.count() == 3
    assert (await put(http, "g", whole)).status_code == 200
    assert records.count() == 3
