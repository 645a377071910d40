"""The door: key on every route and method, Host, Origin."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.routing import Route

from insitu.access.routes import API, Access
from insitu.backend.api.settings import ApiSettings
from insitu.errors import InvalidRequest
from insitu.system.keys import hash_key

from .conftest import KEY

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND")


ROUTES = {
    "/": {"GET"},
    "/app.js": {"GET"},
    "/app.css": {"GET"},
    "/icon.svg": {"GET"},
    "/login": {"POST"},
    "/logout": {"POST"},
    "/session": {"GET"},
    "/health": {"GET"},
    "/ready": {"GET"},
    "/metrics": {"GET"},
    "/v1/openapi.json": {"GET", "HEAD"},
    "/v1/fleet": {"GET"},
    "/v1/runs": {"GET", "POST"},
    "/v1/runs/{name}": {"GET", "DELETE"},
    "/v1/adapters/{sha256}": {"PUT"},
    "/v1/runs/{name}/close": {"POST"},
    "/v1/runs/{name}/alive": {"POST"},
    "/v1/runs/{name}/release": {"POST"},
    "/v1/runs/{name}/steps": {"GET", "POST"},
    "/v1/runs/{name}/checkpoints": {"GET"},
    "/v1/runs/{name}/leases/{lease_id}": {"PUT", "GET", "DELETE"},
    "/v1/runs/{name}/promotions": {"GET"},
    "/v1/runs/{name}/promoted/{step}": {"PUT"},
    "/v1/runs/{name}/promoted": {"DELETE"},
    "/v1/runs/{name}/promotions/{promotion_id}/rollback": {"POST"},
    "/v1/runs/{name}/checkpoints/{step}": {"DELETE"},
    "/v1/runs/{name}/checkpoints/{step}/files/{file}": {"GET"},
    "/v1/runs/{name}/checkpoints/{step}/pin": {"PUT", "DELETE"},
    "/v1/runs/{name}/groups/{group_id}": {"GET", "PUT"},
    "/v1/jobs/{job_id}": {"GET"},
    "/v1/jobs/{job_id}/cancel": {"POST"},
    "/v1/jobs/{job_id}/events": {"GET"},
    "/healthcheck": {"GET"},
    "/register": {"POST"},
    "/_get_step": {"POST"},
    "/_prepare_backend_for_training": {"POST"},
    "/_train_model": {"POST"},
    "/_delete_checkpoint_files": {"POST"},
    "/close": {"POST"},
}


KEYLESS = {route for route, need in API.items() if need in (Access.OPEN, Access.LOGIN)}


def routes_of(app: FastAPI) -> dict[str, set[str]]:
    """What the application itself says it routes, nested routers included."""
    found: dict[str, set[str]] = {}

    def add(path: str, methods) -> None:
        found.setdefault(path, set()).update(method.upper() for method in methods)

    for route in app.routes:
        if isinstance(route, Route):
            add(route.path, route.methods or ())
    for path, operations in app.openapi()["paths"].items():
        add(path, operations)
    return found


def fill(path: str) -> str:
    values = {"{job_id}": "job-" + "0" * 16, "{step}": "1", "{promotion_id}": "1", "{file}": "manifest.json"}
    for name, value in values.items():
        path = path.replace(name, value)
    return re.sub(r"\{[^}]+\}", "run", path)


def test_the_routes_are_the_known_ones(app: FastAPI):
    """A new route must be listed here, and is then tried without a key below."""
    assert routes_of(app) == ROUTES


async def test_every_route_and_method_needs_the_key(app: FastAPI, stranger):
    paths = {fill(path) for path in routes_of(app)}
    wrong = (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": f"Basic {b64encode(b'any:wrong').decode()}"},
        {"Authorization": f"Basic {b64encode(KEY.encode()).decode()}"},
        {"Authorization": KEY},
        {"Authorization": "Bearer"},
        {"x-api-key": KEY},
    )
    for path in sorted(
        paths | {"/", "/nope", "/v1", "/docs", "/redoc", "/openapi.json", "/health/", "/ready/"}
    ):
        for method in METHODS:
            if f"{method} {path}" in KEYLESS:
                continue
            for headers in wrong:
                answer = await stranger.request(method, path, headers=headers)
                assert answer.status_code == 401, (method, path, headers, answer.text)
    # Nothing in the address opens the door either.
    assert (await stranger.get(f"/v1/runs?key={KEY}&api_key={KEY}")).status_code == 401
    assert (await stranger.get("/health")).status_code == 200
    assert (await stranger.get("/ready")).status_code == 503


async def test_other_spellings_of_health_are_no_way_in(stranger):
    for path in ("/health/../v1/runs", "//health", "/HEALTH", "/health%2f..%2fv1%2fruns", "/v1/../health"):
        answer = await stranger.get(path)
        opened = answer.status_code == 200 and ("ledger" in answer.text or "insitu-server" in answer.text)
        assert answer.status_code == 401 or opened, "only what is open without a key"


async def test_two_keys_are_refused(stranger):
    headers = [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer wrong")]
    assert (await stranger.get("/v1/runs", headers=headers)).status_code == 401


async def test_the_key_opens_every_route(http):
    for path, methods in ROUTES.items():
        for method in methods:
            assert (await http.request(method, fill(path))).status_code not in (401, 403, 405, 500)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:7623", "", "[::2]", "a b"])
async def test_foreign_host_names_are_refused(http, host: str):
    answer = await http.get("/v1/runs", headers={"Host": host})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "InvalidRequest"
    assert (await http.get("/health", headers={"Host": host})).status_code == 400


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1:7623", "[::1]:7623"])
async def test_loopback_names_are_accepted(http, host: str):
    assert (await http.get("/v1/runs", headers={"Host": host})).status_code == 200


def test_names_when_listening_everywhere(tmp_path: Path):
    settings = ApiSettings.with_key(tmp_path, KEY, host="0.0.0.0")
    settings = replace(settings, allowed_hosts=("trainer.example",))
    for name in ("10.0.0.5", "[fd00::1]", "localhost", "trainer.example", "Trainer.Example"):
        assert settings.accepts_host(name), name
    for name in ("evil.example", "10.0.0.5.evil.example", ""):
        assert not settings.accepts_host(name), name
    assert not ApiSettings.with_key(tmp_path, KEY).accepts_host("10.0.0.5")


async def test_foreign_pages_cannot_write(http):
    body = {"name": "new", "base_model": "m"}
    for origin in ("https://evil.example", "null", "http://127.0.0.1:9999"):
        answer = await http.post("/v1/runs", json=body, headers={"Origin": origin})
        assert answer.status_code == 403, origin
        assert (await http.get("/v1/runs", headers={"Origin": origin})).status_code == 200
    same = {"Origin": "http://127.0.0.1:7623"}
    assert (await http.post("/v1/runs", json=body, headers=same)).status_code == 200


@pytest.mark.parametrize("key", ["", "default", "short"])
def test_weak_keys_are_for_loopback_only(tmp_path: Path, key: str):
    with pytest.raises(InvalidRequest, match=r"INSITU_API_KEY|0\.0\.0\.0|no key"):
        ApiSettings.with_key(tmp_path, key, host="0.0.0.0")
    if key:
        assert ApiSettings.with_key(tmp_path, key).key_sha256 == hash_key(key)


def test_the_key_is_not_kept(tmp_path: Path):
    settings = ApiSettings.with_key(tmp_path, KEY)
    assert KEY not in repr(settings)
    assert all(KEY not in str(getattr(settings, name)) for name in settings.__slots__)
