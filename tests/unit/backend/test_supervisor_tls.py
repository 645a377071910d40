"""The supervisor's own calls to gateway and API go on over HTTPS, to its own children only."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

pytest.importorskip("ray")

from insitu.backend.announcement import announcement
from insitu.backend.children import wait_answering
from insitu.backend.plan.compute import Asked, choose
from insitu.backend.plan.cpu import read_cpu
from insitu.backend.plan.settings import ServeSettings
from insitu.backend.serve import Supervisor
from insitu.backend.serving.own_certificate import OwnCertificate
from insitu.backend.serving.traffic import Traffic
from insitu.system.tls import TlsFiles
from insitu.wire.routing_table import ServedBase
from tests.support.certificates import self_signed

# A name that the supervisor does not use: it calls its children by their address.
NAMES = "DNS:rl.example.com"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return self_signed(tmp_path, names=NAMES)


@pytest.fixture
def settings(tmp_path: Path, files: TlsFiles) -> ServeSettings:
    compute = choose(read_cpu(), "cpu", Asked(dtype="float32"))
    made = ServeSettings(tmp_path / "state", "cpu", compute, "merged", "shared", "k" * 32, tls=files)
    return replace(made, host="0.0.0.0", port=free_port(), gateway_port=free_port())


@pytest.fixture
def supervisor(settings: ServeSettings) -> Iterator[Any]:
    settings.check()
    settings.logs_dir.mkdir(parents=True)
    made: Any = Supervisor(settings, settings.state_dir, print)
    yield made
    for child in (*made._gateways, made._api):
        child.stop(5.0)


def traffic(http: aiohttp.ClientSession, supervisor: Any) -> Traffic:
    settings = supervisor._settings
    address = supervisor._address(settings.gateway_port)
    return Traffic(http, [address], supervisor._admin_key, 5.0, 5.0, supervisor._trust)


async def test_children_answer_and_take_the_routing_table(
    supervisor: Any, settings: ServeSettings, files: TlsFiles, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("insitu.backend.children._READY_SECONDS", 200.0)
    supervisor._gateways[0].start()
    supervisor._api.start()
    async with aiohttp.ClientSession() as http:
        await wait_answering(http, supervisor._urls(), settings.logs_dir, supervisor._trust)
        delivered = traffic(http, supervisor)
        delivered.base = ServedBase("tiny", "tiny", "base")
        await delivered.push()
        state = await delivered.refresh()
        assert state is not None
        assert state.epoch == delivered.revision
        # The certificate is renewed and the gateway started again: it is still recognised.
        renewed = self_signed(tmp_path, "renewed", NAMES)
        renewed.certificate.replace(files.certificate)
        renewed.key.replace(files.key)
        supervisor._gateways[0].stop(10.0)
        assert supervisor._gateways[0].keep_alive()
        await wait_answering(http, supervisor._urls(), settings.logs_dir, supervisor._trust)
        state = await delivered.refresh()
        assert state is not None
        assert (await delivered.refresh() or state).epoch == delivered.revision


async def test_another_server_on_the_port_is_sent_no_admin_key(
    supervisor: Any, settings: ServeSettings, tmp_path: Path
) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    other = self_signed(tmp_path, "other", NAMES)
    site = web.TCPSite(runner, "127.0.0.1", settings.gateway_port, ssl_context=other.context())
    await site.start()
    try:
        async with aiohttp.ClientSession() as http:
            assert await traffic(http, supervisor).refresh() is None
    finally:
        await runner.cleanup()
    assert asked == []


def test_the_first_of_several_certificates_is_the_servers_own(files: TlsFiles, tmp_path: Path) -> None:
    own = OwnCertificate(files.certificate).fingerprint
    chain = self_signed(tmp_path, "authority").certificate.read_text()
    files.certificate.write_text("a comment\n" + files.certificate.read_text() + chain)
    assert OwnCertificate(files.certificate).fingerprint == own


def test_the_printed_addresses_are_https(settings: ServeSettings) -> None:
    lines = list(announcement(settings, None, 1.0))
    assert [line for line in lines if "https://0.0.0.0" in line] == lines[:2]
    plain = list(announcement(replace(settings, tls=None), None, 1.0))
    assert "http://0.0.0.0" in plain[0]


@pytest.mark.parametrize(
    ("host", "expected"),
    [("::", "https://[::1]:1"), ("fd00::5", "https://[fd00::5]:1"), ("10.0.0.5", "https://10.0.0.5:1")],
)
def test_children_are_called_by_an_address_of_this_machine(
    settings: ServeSettings, host: str, expected: str
) -> None:
    made: Any = Supervisor(replace(settings, host=host), settings.state_dir, print)
    assert made._address(1) == expected
