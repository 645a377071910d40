"""Every route of the API × every method × every kind of key."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Mount, Route

from insitu.access import routes
from insitu.access.key_changes import create_key, revoke_key
from insitu.access.key_file import KEYS_FILE
from insitu.access.routes import Access
from insitu.access.scopes import Scope
from tests.support.scoped_keys import VALID, check_answer, ended_keys, needs, valid_keys

from .conftest import KEY
from .test_api_door import METHODS, fill, routes_of


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_the_table_has_exactly_the_routes(app: FastAPI) -> None:
    every = {f"{method} {path}" for path, methods in routes_of(app).items() for method in methods - {"HEAD"}}
    assert set(routes.API) == every


def test_the_router_has_no_route_that_the_table_cannot_name(app: FastAPI) -> None:
    """A mounted application would be matched by its prefix alone."""
    assert all(isinstance(route, Route) and not isinstance(route, Mount) for route in app.routes)


async def test_every_route_method_and_scope(app: FastAPI, stranger: httpx.AsyncClient, tmp_path: Path):
    keys = valid_keys(tmp_path)
    checked = 0
    for path, methods in routes_of(app).items():
        for method in METHODS:
            for scopes in VALID:
                got = await stranger.request(method, fill(path), headers=bearer(keys[scopes]))
                if method not in methods:
                    assert got.status_code in (404, 405), (method, path, got.status_code)
                    continue
                need = needs(dict(routes.API), f"{method.replace('HEAD', 'GET')} {path}")
                check_answer(need, scopes, got.status_code, got.text, (method, path, scopes))
                checked += 1
    assert checked >= len(routes.API) * len(VALID)


async def test_ended_keys_open_nothing_and_say_why(app: FastAPI, stranger: httpx.AsyncClient, tmp_path: Path):
    for ended, key in ended_keys(tmp_path).items():
        for path, methods in routes_of(app).items():
            for method in methods - {"HEAD"}:
                got = await stranger.request(method, fill(path), headers=bearer(key))
                need = routes.API[f"{method} {path}"]
                if need is Access.LOGIN:
                    assert got.status_code == 400, "its key is in the body"
                    continue
                if need is Access.OPEN:
                    assert got.status_code in (200, 503), "ready is 503 without a supervisor"
                    continue
                assert got.status_code == 401, (method, path)
                assert got.headers["www-authenticate"] == "Bearer"
                assert ended in got.json()["error"]["message"]
                assert "insitu keys create NAME --scope admin" in got.json()["error"]["hint"]
        assert (await stranger.get("/nope", headers=bearer(key))).status_code == 401


async def test_nobody_learns_a_name(stranger: httpx.AsyncClient, tmp_path: Path):
    secret, _ = create_key(tmp_path, "alice", [Scope.INFER])
    revoke_key(tmp_path, "alice")
    answers = [
        await stranger.get("/v1/runs", headers=bearer(key)) for key in ("alice", "insitu_alice", "bob")
    ]
    assert len({answer.text for answer in answers}) == 1
    assert "alice" not in (await stranger.get("/v1/runs", headers=bearer(secret))).text


async def test_the_key_of_the_environment_keeps_every_scope(app: FastAPI, stranger, tmp_path: Path):
    create_key(tmp_path, "a", [Scope.INFER])
    for path, methods in routes_of(app).items():
        for method in methods:
            got = await stranger.request(method, fill(path), headers=bearer(KEY))
            assert got.status_code not in (401, 403, 405, 500)


async def test_a_route_that_is_not_in_the_table_needs_admin(app: FastAPI, stranger, tmp_path: Path):
    @app.post("/v1/new")
    def new() -> dict[str, str]:
        return {}

    keys = valid_keys(tmp_path)
    for scopes, key in keys.items():
        got = await stranger.post("/v1/new", headers=bearer(key))
        assert got.status_code == (200 if Scope.ADMIN in scopes else 403)
    with pytest.raises(pytest.fail.Exception):
        needs(dict(routes.API), "POST /v1/new")


async def test_other_spellings_need_the_same_scope(stranger: httpx.AsyncClient, tmp_path: Path):
    infer, _ = create_key(tmp_path, "a", [Scope.INFER])
    submit, _ = create_key(tmp_path, "b", [Scope.SUBMIT])
    for path in (
        "/v1/runs/run/checkpoints/1",
        "/v1/runs/run/checkpoints/%31",
        "/v1/runs%2Frun/checkpoints/1",
    ):
        assert (await stranger.delete(path, headers=bearer(submit))).status_code == 403, path
    for path in ("/v1/runs", "/%761/runs", "/v1/runs?x=/health", "/v1/runs/run;x"):
        assert (await stranger.get(path, headers=bearer(infer))).status_code == 403, path
    for path in ("/v1//runs", "/v1/runs/", "/V1/RUNS", "/health/../v1/runs"):
        assert (await stranger.get(path, headers=bearer(infer))).status_code in (403, 404), path


async def test_a_basic_password_is_checked_alike(stranger: httpx.AsyncClient, tmp_path: Path):
    infer, _ = create_key(tmp_path, "a", [Scope.INFER])
    submit, _ = create_key(tmp_path, "b", [Scope.SUBMIT])
    assert (await stranger.get("/v1/runs", auth=("any", submit))).status_code == 200
    assert (await stranger.get("/v1/runs", auth=("any", infer))).status_code == 403


async def test_a_running_api_follows_the_file(stranger: httpx.AsyncClient, tmp_path: Path):
    assert (await stranger.get("/v1/runs", headers=bearer("insitu_x"))).status_code == 401
    key, _ = create_key(tmp_path, "a", [Scope.SUBMIT])
    assert (await stranger.get("/v1/runs", headers=bearer(key))).status_code == 200
    revoke_key(tmp_path, "a")
    assert (await stranger.get("/v1/runs", headers=bearer(key))).status_code == 401
    (tmp_path / KEYS_FILE).write_text("damaged")
    got = await stranger.get("/v1/runs", headers=bearer(key))
    assert got.status_code == 503
    assert str(tmp_path) not in got.text
    assert (await stranger.get("/v1/runs", headers=bearer(KEY))).status_code == 200
