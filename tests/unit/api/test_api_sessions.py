"""Sessions of browsers: the cookie, its rights, its end, and the pages it is for."""

from __future__ import annotations

import json
from dataclasses import replace
from http.cookies import SimpleCookie
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from insitu.access.audit_log import AUDIT_FILE
from insitu.access.key_changes import create_key, revoke_key
from insitu.access.key_file import StoredKey, read_keys, write_keys
from insitu.access.key_limits import KeyLimits
from insitu.access.scopes import Scope
from insitu.access.sessions import ATTEMPTS
from insitu.backend.ledger import Ledger
from insitu.types import LoraSettings
from insitu.web_pages import FILES, HEADERS, PAGES
from tests.support.scoped_keys import VALID

from .conftest import KEY
from .test_api_door import fill, routes_of

ORIGIN = {"Origin": "http://127.0.0.1:7623"}
COOKIE = "insitu_session_7623"


async def log_in(client: httpx.AsyncClient, key: str) -> dict[str, str]:
    """Return the headers of a page that is logged in with a key."""
    got = await client.post("/login", json={"key": key}, headers=ORIGIN)
    assert got.status_code == 200, got.text
    client.cookies.clear()
    return {"Cookie": f"{COOKIE}={SimpleCookie(got.headers['set-cookie'])[COOKIE].value}"}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def audit(state_dir: Path) -> list[tuple[str, str]]:
    lines = (state_dir / AUDIT_FILE).read_text().splitlines()
    return [(line["key"], line["change"]) for line in map(json.loads, lines)]


async def test_the_files_need_no_key_and_have_the_strict_policy(stranger: httpx.AsyncClient) -> None:
    page = await stranger.get("/")
    assert page.status_code == 200
    assert '<meta name="insitu-server" content="api" />' in page.text
    assert '<meta name="insitu-server" content="directory" />' in (PAGES / "index.html").read_text()
    for answer in (page, *[await stranger.get(f"/{name}") for name in FILES]):
        assert answer.status_code == 200
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert "script-src 'self'" in HEADERS["content-security-policy"]
    assert "unsafe" not in HEADERS["content-security-policy"]
    assert (await stranger.get("/sources.sha256")).status_code == 401, "not one of the files"
    data = await stranger.get("/v1/runs", headers=bearer(KEY))
    assert data.headers["x-content-type-options"] == "nosniff", "a browser may open any address now"


async def test_the_cookie_is_not_the_key_and_scripts_cannot_read_it(
    app: FastAPI, stranger: httpx.AsyncClient
) -> None:
    got = await stranger.post("/login", json={"key": KEY})
    assert got.json() == {"key": "INSITU_API_KEY", "scopes": ["admin"], "project": None}
    assert got.headers["cache-control"] == "no-store"
    cookie = SimpleCookie(got.headers["set-cookie"])[COOKIE]
    assert KEY not in got.headers["set-cookie"] + got.text
    assert len(cookie.value) >= 43, "256 random bits"
    assert (cookie["httponly"], cookie["samesite"].lower(), cookie["path"]) == (True, "strict", "/")
    assert (cookie["max-age"], cookie["secure"], cookie["domain"]) == ("43200", "", "")
    again = await stranger.post("/login", json={"key": KEY})
    assert SimpleCookie(again.headers["set-cookie"])[COOKIE].value != cookie.value
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="https://127.0.0.1:7623") as encrypted:
        got = await encrypted.post("/login", json={"key": KEY})
    assert SimpleCookie(got.headers["set-cookie"])[COOKIE]["secure"] is True


async def test_a_wrong_key_begins_nothing_and_is_noted(stranger: httpx.AsyncClient, tmp_path: Path) -> None:
    for body in ({"key": "wrong"}, {"key": ""}, {"key": "k" * 9000}, {}, {"key": 1}):
        got = await stranger.post("/login", json=body)
        assert got.status_code == (401 if body == {"key": "wrong"} else 413 if len(str(body)) > 9000 else 400)
        assert "set-cookie" not in got.headers
        assert got.headers["connection"] == "close", "the next attempt is judged as a stranger's"
        assert "wrong" not in got.text.replace("missing or wrong", "")
    await log_in(stranger, KEY)
    assert audit(tmp_path) == [("unknown", "POST /login, rejected"), ("INSITU_API_KEY", "POST /login")]


async def test_guesses_are_few(stranger: httpx.AsyncClient, tmp_path: Path) -> None:
    guesses = [await stranger.post("/login", json={"key": f"guess {n}"}) for n in range(ATTEMPTS + 20)]
    statuses = [guess.status_code for guess in guesses]
    assert set(statuses) == {401, 429}
    assert statuses[:ATTEMPTS] == [401] * ATTEMPTS
    assert (await stranger.post("/login", json={"key": KEY})).status_code == 429, "or guesses could go on"
    assert len(audit(tmp_path)) == statuses.count(401)
    assert (await stranger.get("/v1/runs", headers=bearer(KEY))).status_code == 200


async def test_a_session_ends_with_its_key(stranger: httpx.AsyncClient, tmp_path: Path) -> None:
    for name in ("gone", "short"):
        key, _ = create_key(tmp_path, name, [Scope.SUBMIT], 3600.0)
        page = await log_in(stranger, key)
        assert (await stranger.get("/v1/runs", headers=page)).status_code == 200
        if name == "gone":
            revoke_key(tmp_path, name)
        else:
            path = tmp_path / "keys.json"
            stored = [key if key.name != name else _expired(key) for key in read_keys(path)]
            write_keys(path, stored)
        got = await stranger.get("/v1/runs", headers=page)
        assert got.status_code == 401
        assert ("revoked" if name == "gone" else "expired") in got.json()["error"]["message"]


def _expired(key: StoredKey) -> StoredKey:
    return replace(key, expires_at=key.created_at)


async def test_logging_out_ends_this_session_alone(stranger: httpx.AsyncClient) -> None:
    first, second = await log_in(stranger, KEY), await log_in(stranger, KEY)
    got = await stranger.post("/logout", headers=first | ORIGIN)
    assert got.status_code == 204
    assert SimpleCookie(got.headers["set-cookie"])[COOKIE]["max-age"] == "0"
    assert (await stranger.get("/session", headers=first)).status_code == 401
    assert (await stranger.get("/session", headers=second)).status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("http://127.0.0.1:3000", 403),
        ("http://127.0.0.1:7623", 200),
    ],
)
async def test_changes_in_a_session_come_from_its_own_pages(
    origin: str | None, status: int, stranger: httpx.AsyncClient
) -> None:
    page = await log_in(stranger, KEY)
    sent = page if origin is None else page | {"Origin": origin}
    body = {"name": "new", "base_model": "m"}
    assert (await stranger.post("/v1/runs", json=body, headers=sent)).status_code == status
    assert (await stranger.get("/v1/runs", headers=sent)).status_code == 200
    expected = 403 if status == 403 and origin is not None else 200
    assert (await stranger.post("/login", json={"key": KEY}, headers=sent)).status_code == expected


async def test_a_key_beside_a_cookie_decides(stranger: httpx.AsyncClient, tmp_path: Path) -> None:
    page = await log_in(stranger, KEY)
    infer, _ = create_key(tmp_path, "a", [Scope.INFER])
    assert (await stranger.get("/v1/runs", headers=page | bearer(infer))).status_code == 403
    assert (await stranger.get("/v1/runs", headers=page | bearer("wrong"))).status_code == 401


async def test_a_session_may_what_its_key_may(
    app: FastAPI, stranger: httpx.AsyncClient, tmp_path: Path
) -> None:
    """Every route × method × set of scopes × project: the same answer to key and cookie at the door."""
    checked = 0
    for project in (None, "b"):
        for scopes in VALID:
            name = "-".join([*sorted(scopes), project or "all"])
            key, _ = create_key(tmp_path, name, [*scopes], project=project)
            page = await log_in(stranger, key)
            for path, methods in routes_of(app).items():
                for method in methods if path != "/logout" else ():
                    by_key = await stranger.request(method, fill(path), headers=bearer(key) | ORIGIN)
                    by_page = await stranger.request(method, fill(path), headers=page | ORIGIN)
                    what = (method, path, name, by_key.text, by_page.text)
                    assert (by_key.status_code == 403) == (by_page.status_code == 403), what
                    assert by_page.status_code not in (401, 500), what
                    if by_key.status_code == 403:
                        assert by_page.text == by_key.text, what
                    checked += by_key.status_code == 403
    assert checked > 80


async def test_a_session_sees_the_project_of_its_key(
    stranger: httpx.AsyncClient, tmp_path: Path, ledger: Ledger
) -> None:
    for run in ("a~adder", "b~adder"):
        ledger.register_run("p", run, "model", LoraSettings(), {}, {})
    key, _ = create_key(tmp_path, "team-b", [Scope.SUBMIT], project="b")
    page = await log_in(stranger, key)
    assert (await stranger.get("/session", headers=page)).json()["project"] == "b"
    by_page = (await stranger.get("/v1/runs", headers=page)).json()
    assert by_page == (await stranger.get("/v1/runs", headers=bearer(key))).json()
    assert [run["name"] for run in by_page["runs"]] == ["adder"]
    assert (await stranger.get("/v1/runs/a~adder", headers=page)).status_code == 404


async def test_the_limits_of_a_key_bind_its_sessions(stranger: httpx.AsyncClient, tmp_path: Path) -> None:
    key, _ = create_key(tmp_path, "few", [Scope.SUBMIT], limits=KeyLimits(requests_per_minute=2))
    page = await log_in(stranger, key)
    got = [(await stranger.get("/v1/runs", headers=page)).status_code for _ in range(3)]
    assert got == [200, 200, 429]
