"""Nobody passes without the right key, and no page of another site reaches a local gateway."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import Mock

import pytest
from aiohttp.test_utils import make_mocked_request

from insitu.errors import InvalidRequest, Unauthorized
from insitu.gateway.app import build_app
from insitu.gateway.auth import Guard
from insitu.gateway.shared.settings import Settings
from tests.support.raw_connection import connected
from tests.unit.gateway.conftest import ADMIN, API, GatewayUnderTest

SETTINGS = Settings("sqlite://", "default", "admin")
KEY = "k" * 32


def all_routes() -> list[tuple[str, str]]:
    named = {"rollout_id": "r", "function": "f", "model": "tiny", "engine": "replica-0"}
    return [
        (method, route.resource.canonical.format(**named))
        for route in build_app(SETTINGS).router.routes()
        if route.resource is not None
        for method in {route.method, "GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"}
    ]


async def test_every_route_but_health_needs_a_key(gateway: GatewayUnderTest) -> None:
    checked = 0
    for method, path in all_routes():
        if path in {"/health", "/ready"}:
            continue
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic default"}):
            async with gateway.session.request(method, gateway.url + path, headers=headers) as got:
                assert got.status == 401, (method, path)
                checked += 1
    assert checked > 100
    async with gateway.session.get(f"{gateway.url}/nothing/here") as got:
        assert got.status == 401
    async with gateway.session.get(f"{gateway.url}/health") as got:
        assert (got.status, (await got.json())["status"]) == (200, "ok")
    async with gateway.session.get(f"{gateway.url}/ready") as got:
        assert (got.status, await got.json()) == (200, {"ready": True, "causes": []})


async def test_keys_are_not_interchangeable(gateway: GatewayUnderTest) -> None:
    for path, headers in (("/control/state", API), ("/v1/models", ADMIN), ("/control/state?key=admin", {})):
        async with gateway.session.get(gateway.url + path, headers=headers) as got:
            assert got.status == 401


@pytest.mark.parametrize(
    "headers", [{"host": "evil.example"}, {"origin": "https://evil.example"}, {"host": "[::1"}]
)
async def test_browsers_of_other_sites_are_refused(
    gateway: GatewayUnderTest, headers: dict[str, str]
) -> None:
    async with gateway.session.get(f"{gateway.url}/v1/models", headers=API | headers) as got:
        assert got.status == 400


async def test_unknown_paths_answer_in_json(gateway: GatewayUnderTest) -> None:
    for method, path, status in (("GET", "/v1/embeddings", 404), ("DELETE", "/v1/models", 405)):
        async with gateway.session.request(method, gateway.url + path, headers=API) as got:
            assert got.status == status
            assert "message" in (await got.json())["error"]


async def test_a_body_over_the_limit_is_refused(start_gateway) -> None:
    gateway = await start_gateway(max_body_bytes=1000)
    status, body, _ = await gateway.post(messages=[{"role": "user", "content": "x" * 2000}])
    assert (status, body["error"]["type"]) == (413, "TooLarge")


async def test_a_body_over_the_limit_is_refused_as_soon_as_it_is_known(start_gateway) -> None:
    gateway = await start_gateway(max_body_bytes=1000)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer default\r\n"
    chunk = b"401\r\n" + b"x" * 1025 + b"\r\n"  # and no last one
    for rest in (b"Content-Length: 1001\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n" + chunk):
        async with connected(int(gateway.url.rpartition(":")[2]), head + rest) as (reader, _):
            async with asyncio.timeout(5):
                assert (await reader.readline()).split()[1] == b"413"


def test_public_addresses_need_a_real_key() -> None:
    for host, key in (("0.0.0.0", "default"), ("10.0.0.1", "short"), ("127.0.0.1", "")):
        with pytest.raises(InvalidRequest, match="key is"):
            replace(SETTINGS, host=host, api_key=key, behind_proxy=True).check()
    replace(SETTINGS, host="0.0.0.0", api_key=KEY, behind_proxy=True).check()
    SETTINGS.check()


@pytest.mark.parametrize(
    ("remote", "passes"),
    [("127.0.0.1", True), ("10.0.0.5", True), ("10.0.0.6", False), ("::ffff:10.0.0.5", False)],
)
def test_control_routes_are_for_callers_on_this_machine(remote: str, passes: bool) -> None:
    """Who calls a gateway on 10.0.0.5 from its own machine comes from 10.0.0.5: so does its supervisor."""
    guard = Guard(replace(SETTINGS, host="10.0.0.5", api_key=KEY, admin_key=KEY))
    transport = Mock(
        get_extra_info=lambda name, default=None: (remote, 5000) if name == "peername" else default
    )
    headers = {"host": "10.0.0.5:8000", "authorization": f"Bearer {KEY}"}
    request = make_mocked_request("GET", "/control/state", headers=headers, transport=transport)
    request.match_info.route.resource = Mock(canonical="/control/state")
    assert request.remote == remote
    with nullcontext() if passes else pytest.raises(Unauthorized):
        guard.identify(request)


def test_keys_are_not_shown() -> None:
    assert KEY not in repr(replace(SETTINGS, api_key=KEY, admin_key=KEY))
