"""Every change that a key makes at the API is in the audit log, and none is made without its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from insitu.access.audit_log import AUDIT_FILE
from insitu.access.key_changes import create_key
from insitu.access.scopes import Scope
from insitu.backend.api.security import address_of
from insitu.backend.http.forwarded import Forwarded

from .test_api_door import fill, routes_of
from .test_api_scopes import bearer

SAFE = {"GET", "HEAD"}


def noted(directory: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in (directory / AUDIT_FILE).read_text().splitlines()]
    return [(line["key"], line["change"]) for line in lines if not line["change"].startswith("keys ")]


async def test_every_route_that_changes_something_is_noted_once(
    app: FastAPI, stranger: httpx.AsyncClient, tmp_path: Path
):
    key, _ = create_key(tmp_path, "alice", [Scope.ADMIN])
    expected: list[tuple[str, str]] = []
    for path, methods in routes_of(app).items():
        for method in sorted(methods):
            await stranger.request(method, fill(path), headers=bearer(key))
            if method not in SAFE and path != "/login":  # noted by its key in the body: test_api_sessions.py
                expected.append(("alice", f"{method} {fill(path)}"))
    assert len(expected) >= 12
    assert noted(tmp_path) == expected


async def test_the_key_of_the_environment_has_a_name_too(http: httpx.AsyncClient, tmp_path: Path):
    await http.post("/v1/runs", json={})
    assert noted(tmp_path) == [("INSITU_API_KEY", "POST /v1/runs")]


async def test_requests_that_change_nothing_leave_no_line(stranger: httpx.AsyncClient, tmp_path: Path):
    key, _ = create_key(tmp_path, "reader", [Scope.INFER])
    answers = [
        await stranger.post("/v1/runs", json={}, headers=bearer(key)),
        await stranger.post("/v1/runs", json={}, headers=bearer("wrong")),
        await stranger.post("/nowhere", json={}, headers=bearer(key)),
        await stranger.get("/v1/runs", headers=bearer(key)),
    ]
    assert [answer.status_code for answer in answers] == [403, 401, 404, 403]
    assert noted(tmp_path) == []


async def test_a_change_that_cannot_be_noted_is_not_made(http: httpx.AsyncClient, tmp_path: Path):
    (tmp_path / AUDIT_FILE).mkdir()
    answer = await http.post("/v1/runs", json={"name": "new", "base_model": "tiny"})
    assert answer.status_code == 503
    assert "cannot be noted in audit.jsonl" in answer.json()["error"]["message"]
    assert (await http.get("/v1/runs/new")).status_code == 404


@pytest.mark.parametrize(
    ("peer", "behind_proxy", "sent", "seen", "scheme"),
    [
        (
            "127.0.0.1",
            False,
            {"x-forwarded-for": "10.1.1.1", "x-forwarded-proto": "https"},
            "127.0.0.1",
            "https",
        ),
        (
            "10.0.0.9",
            False,
            {"x-forwarded-for": "10.1.1.1", "x-forwarded-proto": "https"},
            "10.0.0.9",
            "http",
        ),
        ("10.0.0.9", True, {"x-forwarded-for": '"key":"admin, 10.1.1.1'}, "10.1.1.1", "http"),
        ("10.0.0.9", True, {"x-forwarded-for": '10.1.1.1, "key":"admin'}, "10.0.0.9", "http"),
        ("10.0.0.9", True, {}, "10.0.0.9", "http"),
    ],
)
async def test_an_address_is_never_the_clients_own_word(
    peer: str, behind_proxy: bool, sent: dict[str, str], seen: str, scheme: str
) -> None:
    found: list[tuple[str, str]] = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        found.append((address_of(scope), scope["scheme"]))

    headers = [(name.encode(), value.encode()) for name, value in sent.items()]
    scope: Any = {"type": "http", "client": (peer, 5000), "scheme": "http", "headers": headers}
    nothing: Any = None
    await Forwarded(app, behind_proxy=behind_proxy)(scope, nothing, nothing)
    assert found == [(seen, scheme)]
