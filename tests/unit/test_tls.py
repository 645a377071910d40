"""API and gateway over HTTPS: who is let in, what is refused before the start, and who trusts whom."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import click
import httpx
import pytest
import uvicorn
from aiohttp import web
from click.testing import CliRunner

from insitu.backend.api.settings import ApiSettings
from insitu.backend.api.settings import Limits as ApiLimits
from insitu.backend.http.app import build_api
from insitu.backend.http.process import main as api_main
from insitu.backend.http.process import parse as parse_api
from insitu.backend.http.process import server_config
from insitu.cli import cli
from insitu.client import InsituClient
from insitu.errors import InvalidRequest, Untrusted
from insitu.gateway.app import build_app
from insitu.gateway.process import listen, settings_from
from insitu.gateway.process import main as gateway_main
from insitu.gateway.shared.settings import Limits, Settings
from insitu.harness.backend_adapter import BackendAdapter
from insitu.harness.interfaces.settings import AdapterConfig
from insitu.system.processes import bind
from insitu.system.tls import TlsFiles, check_listener, listener_arguments, tls_files
from insitu.testing.standins import StandinParts
from tests.support.certificates import self_signed

KEY = "k" * 32
REFUSED = "add --tls-certificate FILE --tls-key FILE, or --behind-proxy"


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return self_signed(tmp_path)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


Reached = tuple[str, str, str]
"""A server's address without the scheme, a path that needs a key, and that key."""


@contextlib.asynccontextmanager
async def api(state: Path, tls: TlsFiles | None, *, behind_proxy: bool = False) -> AsyncIterator[Reached]:
    settings = ApiSettings.with_key(state, KEY)
    settings = replace(settings, allowed_hosts=("rl.example.com",))
    with bind("127.0.0.1", 0) as sock:
        config = server_config(build_api(settings), settings.limits, tls, behind_proxy=behind_proxy)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([sock]))
        try:
            async with asyncio.timeout(60):
                while not server.started:
                    assert not serving.done(), serving.exception()
                    await asyncio.sleep(0.01)
            yield f"127.0.0.1:{sock.getsockname()[1]}", "/v1/runs", KEY
        finally:
            server.should_exit = True
            await serving


@contextlib.asynccontextmanager
async def gateway(state: Path, tls: TlsFiles | None) -> AsyncIterator[Reached]:
    arguments = ["--records", f"sqlite:///{state}/calls.db", "--managed", "--port", str(free_port())]
    arguments += ["--allowed-host", "RL.example.com", *listener_arguments(tls, behind_proxy=False)]
    settings = replace(settings_from(arguments), api_key=KEY, admin_key="admin")
    runner = web.AppRunner(build_app(settings))
    await runner.setup()
    try:
        await listen(runner, settings)
        yield f"127.0.0.1:{settings.port}", "/control/state", "admin"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("server", [api, gateway])
async def test_a_keyed_request_over_https_works_and_plain_http_does_not(
    tmp_path: Path, files: TlsFiles, server
) -> None:
    trust = ssl.create_default_context(cafile=str(files.certificate))
    async with server(tmp_path, files) as (address, path, key), aiohttp.ClientSession() as http:
        url = f"https://{address}"
        async with http.get(url + path, ssl=trust) as answer:
            assert answer.status == 401
        async with http.get(url + path, ssl=trust, headers={"Authorization": f"Bearer {key}"}) as answer:
            assert answer.status == 200
        with pytest.raises(aiohttp.ClientError):
            await http.get(f"http://{address}/health")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await http.get(f"{url}/health")
        async with http.get(f"{url}/health", ssl=trust) as answer:
            assert answer.status == 200, "nothing of that has disturbed the server"


async def test_a_connection_without_a_handshake_is_closed(tmp_path: Path, files: TlsFiles) -> None:
    records = f"sqlite:///{tmp_path}/calls.db"
    settings = Settings(records, KEY, port=free_port(), tls=files, limits=Limits(head_seconds=0.2))
    runner = web.AppRunner(build_app(settings))
    await runner.setup()
    try:
        await listen(runner, settings)
        reader, writer = await asyncio.open_connection("127.0.0.1", settings.port)
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
    finally:
        await runner.cleanup()


def test_the_api_refuses_plain_http_beyond_loopback(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("insitu.backend.http.process.log_to", lambda _: None)
    monkeypatch.setenv("INSITU_API_KEY", KEY)
    state = tmp_path / "state"
    assert api_main(["--state-dir", str(state), "--host", "0.0.0.0", "--port", "0"]) == 2
    assert REFUSED in capsys.readouterr().err
    assert not state.exists(), "nothing was made"


def test_the_gateway_refuses_plain_http_beyond_loopback(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("insitu.gateway.process.log_to", lambda _: None)
    monkeypatch.setenv("INSITU_API_KEY", KEY)
    with pytest.raises(SystemExit, match=re.escape(REFUSED)):
        gateway_main(["--records", f"sqlite:///{tmp_path}/calls.db", "--managed", "--host", "0.0.0.0"])
    assert not list(tmp_path.iterdir()), "nothing was opened"


async def test_the_scheme_of_a_proxy_is_that_of_the_gateways_address(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"gateway_port": 8000}')
    async with api(tmp_path, None, behind_proxy=True) as (address, *_), aiohttp.ClientSession() as http:
        for sent, scheme in (({"X-Forwarded-Proto": "https"}, "https"), ({}, "http")):
            headers = {"Host": "rl.example.com", **sent}
            async with http.get(f"http://{address}/health", headers=headers) as answer:
                assert (await answer.json())["gateway_url"] == f"{scheme}://rl.example.com:8000"


@pytest.mark.parametrize(("behind_proxy", "scheme"), [(True, "https"), (False, "http")])
async def test_a_proxy_elsewhere_is_believed_only_if_there_is_one(
    tmp_path: Path, behind_proxy: bool, scheme: str
) -> None:
    config = server_config(
        build_api(ApiSettings.with_key(tmp_path, KEY)), ApiLimits(), None, behind_proxy=behind_proxy
    )
    config.load()
    (tmp_path / "status.json").write_text('{"gateway_port": 8000}')
    app: Any = config.loaded_app
    transport = httpx.ASGITransport(app, client=("10.0.0.9", 5000))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        answer = await http.get("/health", headers={"X-Forwarded-Proto": "https"})
    assert answer.json()["gateway_url"] == f"{scheme}://127.0.0.1:8000"


async def test_a_gateway_on_loopback_answers_to_the_name_that_a_proxy_passes_on(tmp_path: Path) -> None:
    async with gateway(tmp_path, None) as (address, *_), aiohttp.ClientSession() as http:
        for name, status in (("rl.example.com", 502), ("evil.example.com", 400)):
            headers = {"Authorization": f"Bearer {KEY}", "Host": name}
            async with http.get(f"http://{address}/v1/models", headers=headers) as answer:
                assert answer.status == status, (name, await answer.text())


PROGRAM = """
import asyncio, sys
from insitu.client import InsituClient
async def main():
    async with InsituClient(sys.argv[1], sys.argv[2]) as client:
        print((await client.health()).service, len(await client.list_runs()))
asyncio.run(main())
"""


async def test_the_client_trusts_the_authority_of_ssl_cert_file(tmp_path: Path, files: TlsFiles) -> None:
    """In another process: the variable is read once, when Python's first TLS context is made."""
    async with api(tmp_path, files) as (address, *_):
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAM, f"https://{address}", KEY),
            env={**os.environ, "SSL_CERT_FILE": str(files.certificate)},
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await asyncio.wait_for(child.communicate(), 120)
    assert said == b"insitu 0\n"


async def test_the_client_says_at_once_that_a_certificate_is_not_trusted(
    tmp_path: Path, files: TlsFiles
) -> None:
    async with api(tmp_path, files) as (address, *_), InsituClient(f"https://{address}", KEY) as client:
        with pytest.raises(Untrusted, match="its certificate is not trusted") as refused:
            await client.health()
    assert "export SSL_CERT_FILE=" in refused.value.hint


async def test_the_client_says_that_a_server_speaks_plain_http(tmp_path: Path) -> None:
    async with api(tmp_path, None) as (address, *_), InsituClient(f"https://{address}", KEY) as client:
        with pytest.raises(Untrusted, match="does not speak TLS") as refused:
            await client.health()
    assert "write http://" in refused.value.hint


async def test_finetune_says_that_a_certificate_is_not_trusted(tmp_path: Path, files: TlsFiles) -> None:
    async with api(tmp_path, files) as (address, *_):
        backend = {"ip": "127.0.0.1", "port": int(address.partition(":")[2]), "tls": True, "api_key": KEY}
        config = AdapterConfig.model_validate({"_type": "insitu", "backend": backend})
        assert config.backend.url == f"https://{address}"
        adapter = BackendAdapter(config, StandinParts(tmp_path))
        assert adapter.trained_model.gateway_url == "https://127.0.0.1:8000"
        with pytest.raises(Untrusted, match="its certificate is not trusted"):
            await adapter.check()


def refusal(tls: TlsFiles | None, host: str = "127.0.0.1", *, behind_proxy: bool = False) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        check_listener(host, tls, behind_proxy=behind_proxy)
    return refused.value


def test_a_good_pair_is_taken_on_every_address(files: TlsFiles) -> None:
    for host in ("127.0.0.1", "0.0.0.0", "10.0.0.5", "rl.example.com"):
        check_listener(host, files, behind_proxy=False)
        check_listener(host, None, behind_proxy=True)
    for host in ("127.0.0.1", "::1", "localhost"):
        check_listener(host, None, behind_proxy=False)


def test_versions_before_1_2_are_not_spoken(tmp_path: Path, files: TlsFiles) -> None:
    app = build_api(ApiSettings.with_key(tmp_path, KEY))
    config = server_config(app, ApiLimits(), files, behind_proxy=False)
    config.load()
    assert config.ssl is not None
    for context in (files.context(), config.ssl):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "rl.example.com"])
def test_plain_http_beyond_loopback_is_refused(host: str) -> None:
    refused = refusal(None, host)
    assert host in refused.message
    assert "--behind-proxy" in refused.hint


def test_a_file_that_is_missing_or_unreadable_is_refused_by_name(tmp_path: Path, files: TlsFiles) -> None:
    missing = tmp_path / "none.pem"
    for option, pair in (
        ("--tls-certificate", TlsFiles(missing, files.key)),
        ("--tls-key", TlsFiles(files.certificate, missing)),
    ):
        refused = refusal(pair)
        assert refused.message == f"{option} {missing} cannot be read: No such file or directory"
        assert refused.hint == f"ls -l {missing}"
    assert "Is a directory" in refusal(TlsFiles(tmp_path, files.key)).message


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, files: TlsFiles) -> None:
    other = self_signed(tmp_path, "other")
    refused = refusal(TlsFiles(files.certificate, other.key))
    assert "KEY_VALUES_MISMATCH" in refused.message
    assert f"openssl pkey -pubout -in {other.key}" in refused.hint
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    assert str(text) in refusal(TlsFiles(text, files.key)).message


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_can_read_is_refused_with_the_command(files: TlsFiles, mode: int) -> None:
    files.key.chmod(mode)
    refused = refusal(files)
    assert f"mode {mode:o}" in refused.message
    assert refused.hint == f"chmod 600 {files.key}"


def test_an_encrypted_key_is_refused_and_nobody_is_asked(tmp_path: Path, files: TlsFiles) -> None:
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkey", "-in", str(files.key), "-aes256", "-passout", "pass:x", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    locked.chmod(0o600)
    refused = refusal(TlsFiles(files.certificate, locked))
    assert "is encrypted" in refused.message
    assert "openssl pkey" in refused.hint


def test_both_files_or_neither(tmp_path: Path) -> None:
    assert tls_files(None, None) is None
    for given, missing in ((("c.pem", None), "--tls-key"), ((None, "c.key"), "--tls-certificate")):
        with pytest.raises(InvalidRequest) as refused:
            tls_files(*given)
        assert refused.value.hint == f"add {missing} FILE"


def test_a_proxy_and_a_certificate_exclude_each_other(files: TlsFiles) -> None:
    assert refusal(files, behind_proxy=True).hint.startswith("remove --behind-proxy")


@pytest.mark.parametrize("command", [("serve",), ("gateway", "--upstream", "http://127.0.0.1:9")])
def test_the_commands_refuse_before_anything_starts(
    tmp_path: Path, monkeypatch, command: tuple[str, ...]
) -> None:
    if command[0] == "serve":
        pytest.importorskip("ray")
    monkeypatch.setenv("INSITU_API_KEY", KEY)
    monkeypatch.setenv("INSITU_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    for options, said in (
        (("--host", "0.0.0.0"), "--behind-proxy"),
        (("--tls-key", "x.key"), "add --tls-certificate FILE"),
        (("--tls-key", "x.key", "--tls-certificate", "x.pem"), "x.pem cannot be read"),
    ):
        result = CliRunner().invoke(cli, [*command, *options])
        assert result.exit_code != 0
        assert said in f"{result.output}{result.exception}", options
        assert not list(tmp_path.iterdir()), "nothing was written"


def test_every_server_listens_on_loopback_by_itself(tmp_path: Path) -> None:
    gateway = settings_from(["--records", "sqlite://", "--managed"])
    api = parse_api(["--state-dir", str(tmp_path)])
    assert {gateway.host, api.host, ApiSettings(tmp_path, b"").host} == {"127.0.0.1"}
    for name in ("serve", "gateway"):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        assert [option.default for option in command.params if option.name == "host"] == ["127.0.0.1"]
