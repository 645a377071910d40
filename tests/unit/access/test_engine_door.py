from __future__ import annotations

from typing import Any

import pytest

from insitu.access import engine_door
from insitu.access.engine_door import EngineDoor, headers


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    key = engine_door.new_key()
    monkeypatch.setenv(engine_door.VARIABLE, key)
    return key


async def status_of(scope: dict[str, Any], sent: dict[str, str]) -> int:
    """The status that a request with these headers gets; 200 if it passes the door."""
    answers: list[Any] = []

    async def engine(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"status": 200})

    async def receive() -> Any:
        return {}

    async def send(message: Any) -> None:
        answers.append(message)

    raw = [(name.encode(), value.encode()) for name, value in sent.items()]
    await EngineDoor(engine)(scope | {"headers": raw}, receive, send)
    return answers[0].get("status") or answers[0]["code"]


async def test_only_the_key_opens_the_door(key: str) -> None:
    http = {"type": "http", "path": "/collective_rpc"}
    assert await status_of(http, headers(key)) == 200
    assert await status_of(http, {"host": "127.0.0.1"} | headers(key)) == 200
    wrong: list[dict[str, str]] = [{}, headers("0" * 64), headers(key[:-1]), headers(key + "0")]
    for sent in [*wrong, {"authorization": f"Bearer {key}"}]:
        assert await status_of(http, sent) == 401
    assert await status_of({"type": "websocket", "path": "/v1/realtime"}, {}) == 1008


async def test_the_server_itself_may_start_and_stop(key: str) -> None:
    assert await status_of({"type": "lifespan"}, {}) == 200


def test_a_door_without_a_key_does_not_open_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(engine_door.VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=engine_door.VARIABLE):
        EngineDoor(lambda *_: None)  # pyright: ignore[reportArgumentType]


def test_an_engine_of_others_gets_no_header_of_ours() -> None:
    assert headers("") == {}
