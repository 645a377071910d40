from __future__ import annotations

from pathlib import Path

import pytest

from insitu.backend.ledger import Ledger
from insitu.errors import Unavailable


async def test_health_without_a_supervisor(stranger):
    answer = await stranger.get("/health")
    assert answer.status_code == 200
    body = answer.json()
    assert (body["status"], body["ledger"], body["supervisor"]) == ("ok", "ok", None)
    assert (body["service"], body["gateway_url"]) == ("insitu", None)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1:7623", "http://127.0.0.1:8001"),
        ("localhost:7623", "http://localhost:8001"),
        ("[::1]:7623", "http://[::1]:8001"),
    ],
)
async def test_health_says_where_the_gateway_is(stranger, tmp_path: Path, host: str, expected: str):
    (tmp_path / "status.json").write_text('{"gateway_port": 8001}')
    body = (await stranger.get("/health", headers={"Host": host})).json()
    assert body["gateway_url"] == expected


async def test_health_names_every_gateway(stranger, tmp_path: Path):
    (tmp_path / "status.json").write_text('{"gateway_port": 8001, "num_gateways": 3}')
    body = (await stranger.get("/health", headers={"Host": "127.0.0.1:7623"})).json()
    assert body["gateway_urls"] == [f"http://127.0.0.1:{port}" for port in (8001, 8002, 8003)]
    assert body["gateway_url"] == body["gateway_urls"][0]


async def test_health_shows_the_supervisors_view(stranger, tmp_path: Path):
    (tmp_path / "status.json").write_text('{"replicas": {"replica-0": "ready"}}')
    body = (await stranger.get("/health")).json()
    assert body["supervisor"] == {"replicas": {"replica-0": "ready"}}
    assert 0 <= body["supervisor_age_seconds"] < 60


@pytest.mark.parametrize("content", ["{", "[]", "x" * 300_000])
async def test_a_view_that_cannot_be_used_is_said(stranger, tmp_path: Path, content: str):
    (tmp_path / "status.json").write_text(content)
    answer = await stranger.get("/health")
    assert answer.status_code == 200
    assert "status.json" in answer.json()["supervisor"]["error"]


async def test_health_fails_with_the_ledger(stranger, ledger: Ledger, monkeypatch):
    def broken():
        raise Unavailable("the ledger cannot be read: disk I/O error")

    monkeypatch.setattr(ledger, "ping", broken)
    answer = await stranger.get("/health")
    assert answer.status_code == 503
    assert answer.json()["ledger"] == "the ledger cannot be read: disk I/O error"
