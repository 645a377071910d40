"""Requests without a key are parsed at a pace, those of each open route at one of its own."""

from __future__ import annotations

import json

import pytest

from insitu.access.routes import GATEWAY
from insitu.access.strangers import BURST, MOST_HEAD_BYTES, PACE, Strangers, Verdict
from insitu.errors import Unauthorized

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def strangers(clock: Clock, *, used_up: bool = True) -> Strangers:
    def is_key(authorization: str, key: str) -> bool:
        if key == "ended":
            raise Unauthorized("the key has expired")
        return "right" in (authorization.removeprefix("Bearer "), key)

    made = Strangers(GATEWAY, is_key, "send a key", clock=clock)
    if used_up:
        for _ in range(int(BURST)):
            assert made.judge(POST + b"\r\n") is Verdict.PARSE
    return made


@pytest.mark.parametrize(
    ("sent", "verdict"),
    [
        (POST + b"\r\n", Verdict.REJECT),
        (POST + b"Authorization: Bearer wrong\r\n\r\n", Verdict.REJECT),
        (POST + b"x-api-key: ended\r\n\r\n", Verdict.REJECT),
        (POST + b"Authorization: Bearer right\r\n\r\n", Verdict.PARSE),
        (POST + b"AUTHORIZATION:Bearer right \r\nA: b\r\n\r\nbody", Verdict.PARSE),
        (POST + b"X-Api-Key: right\r\n\r\n", Verdict.PARSE),
        (POST + b"\r\nAuthorization: Bearer right\r\n\r\n", Verdict.REJECT),  # in the body
        (POST + b"Authorization: Bearer ri", Verdict.WAIT),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", Verdict.PARSE),
        (b"GET /healthy HTTP/1.1\r\nHost: x\r\n\r\n", Verdict.REJECT),
        (b"\x16\x03\x01\r\n\r\n", Verdict.REJECT),
        (POST + b"X: " + b"x" * MOST_HEAD_BYTES, Verdict.TOO_LARGE),
    ],
)
def test_beyond_the_pace(sent: bytes, verdict: Verdict) -> None:
    assert strangers(Clock()).judge(sent) is verdict


def test_the_pace_comes_back_with_time() -> None:
    clock = Clock()
    judges = strangers(clock)
    assert judges.judge(POST + b"\r\n") is Verdict.REJECT
    clock.now += 1.5 / PACE
    verdicts = [judges.judge(POST + b"\r\n") for _ in range(2)]
    assert verdicts == [Verdict.PARSE, Verdict.REJECT]
    assert judges.num_unparsed == 2


def test_every_open_route_has_a_pace_of_its_own() -> None:
    clock = Clock()
    judges = strangers(clock)
    health, ready = (b"GET /%b HTTP/1.1\r\nHost: x\r\n" % name for name in (b"health", b"ready"))
    verdicts = [judges.judge(health + b"\r\n") for _ in range(int(BURST) + 1)]
    assert verdicts == [Verdict.PARSE] * int(BURST) + [Verdict.TOO_MANY]
    assert judges.judge(health) is Verdict.WAIT, "for a key"
    assert judges.judge(health + b"X-Api-Key: right\r\n\r\n") is Verdict.PARSE
    assert judges.judge(ready + b"\r\n") is Verdict.PARSE
    assert judges.judge(POST + b"\r\n") is Verdict.REJECT, "it takes no place of an open route"
    clock.now += 1.5 / PACE
    assert [judges.judge(health + b"\r\n") for _ in range(2)] == [Verdict.PARSE, Verdict.TOO_MANY]


def test_a_head_that_is_too_large_is_rejected_within_the_pace() -> None:
    judges = strangers(Clock(), used_up=False)
    many = b"".join(b"X-%d: y\r\n" % number for number in range(20_000))
    assert judges.judge(POST + many) is Verdict.TOO_LARGE


@pytest.mark.parametrize(
    ("verdict", "status"),
    [(Verdict.REJECT, b"401"), (Verdict.TOO_MANY, b"429"), (Verdict.TOO_LARGE, b"431")],
)
def test_an_unparsed_answer_is_http(verdict: Verdict, status: bytes) -> None:
    head, _, body = strangers(Clock()).answers[verdict].partition(b"\r\n\r\n")
    assert head.split()[1] == status
    assert b"Content-Length: %d\r\n" % len(body) in head + b"\r\n"
    assert (b"Retry-After: 1\r\n" in head) == (verdict is Verdict.TOO_MANY)
    assert json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("cookie", "verdict"), [(b"a=b; session=open", Verdict.PARSE), (b"session=ended", Verdict.REJECT)]
)
def test_a_session_passes_as_a_key_does(cookie: bytes, verdict: Verdict) -> None:
    judges = Strangers(
        GATEWAY, lambda *_: False, "send a key", is_session=lambda sent: "session=open" in sent, clock=Clock()
    )
    for _ in range(int(BURST)):
        assert judges.judge(POST + b"\r\n") is Verdict.PARSE
    assert judges.judge(POST + b"Cookie: " + cookie + b"\r\n\r\n") is verdict
    assert strangers(Clock()).judge(POST + b"Cookie: session=open\r\n\r\n") is Verdict.REJECT, "no sessions"
