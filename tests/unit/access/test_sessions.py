"""Sessions end with time, and each key has a bounded number of them."""

from __future__ import annotations

import pytest

from insitu.access.sessions import ATTEMPTS, LIFETIME_SECONDS, MOST_PER_KEY, Sessions
from insitu.errors import LimitReached
from insitu.system.keys import hash_key


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_session_ends_with_time() -> None:
    clock = Clock()
    sessions = Sessions(clock=clock)
    session = sessions.begin("key")
    clock.now = LIFETIME_SECONDS - 1
    assert sessions.key_hash(session) == hash_key("key")
    clock.now = LIFETIME_SECONDS
    assert sessions.key_hash(session) is None
    assert sessions.key_hash("") is None


def test_a_key_pushes_out_its_own_oldest_session() -> None:
    sessions = Sessions(clock=Clock())
    other = sessions.begin("other")
    own = [sessions.begin("key") for _ in range(MOST_PER_KEY + 2)]
    assert [sessions.key_hash(each) is not None for each in own] == [False] * 2 + [True] * MOST_PER_KEY
    assert sessions.key_hash(other) == hash_key("other")


def test_attempts_come_back_with_time() -> None:
    clock = Clock()
    sessions = Sessions(clock=clock)
    for _ in range(ATTEMPTS):
        sessions.check_attempts()
        sessions.note_wrong()
    with pytest.raises(LimitReached):
        sessions.check_attempts()
    clock.now = 1.0
    sessions.check_attempts()
    sessions.note_wrong()
    with pytest.raises(LimitReached):
        sessions.check_attempts()
