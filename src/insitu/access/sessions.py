"""Sessions of web browsers: a key is exchanged once for a random id, which stands for it until it ends.

    POST /login ── key ──► valid? ──► id, in a cookie ──► later requests ──► the key's hash ──► Keyring

A session holds no rights of its own: every request asks the keyring for the key's present ones, so a revoked
or expired key ends its sessions at once. They are in memory alone: a restart ends all of them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from insitu.errors import LimitReached
from insitu.system.keys import hash_key

LIFETIME_SECONDS = 12 * 3600
MOST_PER_KEY = 16
"""Beyond it the key's oldest session ends."""
ATTEMPTS = 20
"""Wrong keys in a row that are looked at; then one per `ATTEMPT_SECONDS`."""
ATTEMPT_SECONDS = 1.0
_ID_BYTES = 32


@dataclass(frozen=True, slots=True)
class _Session:
    key_hash: bytes
    ends_at: float


class Sessions:
    """The sessions of one process; used from its event loop only."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: dict[bytes, _Session] = {}
        """By the hash of the id, oldest first."""
        self._wrong, self._wrong_at = 0.0, clock()

    def check_attempts(self) -> None:
        """Raise LimitReached while too many wrong keys were sent; this bounds guesses and their log lines."""
        now = self._clock()
        self._wrong = max(0.0, self._wrong - (now - self._wrong_at) / ATTEMPT_SECONDS)
        self._wrong_at = now
        if self._wrong > ATTEMPTS - 1:
            raise LimitReached(
                "Too many logins with a wrong key.", hint="retry in a second; keys in headers still work"
            )

    def note_wrong(self) -> None:
        """Count a login with a wrong key."""
        self._wrong += 1

    def begin(self, key: str) -> str:
        """Begin a session of a valid key; return its id, which is not stored."""
        now, key_hash = self._clock(), hash_key(key)
        self._sessions = {digest: each for digest, each in self._sessions.items() if each.ends_at > now}
        own = [digest for digest, each in self._sessions.items() if each.key_hash == key_hash]
        for digest in own[: max(0, len(own) - MOST_PER_KEY + 1)]:
            del self._sessions[digest]
        session = secrets.token_urlsafe(_ID_BYTES)
        self._sessions[hash_key(session)] = _Session(key_hash, now + LIFETIME_SECONDS)
        return session

    def key_hash(self, session: str) -> bytes | None:
        """Return the hash of a session's key; None if there is no such session, or none any more."""
        found = self._sessions.get(hash_key(session))
        return None if found is None or found.ends_at <= self._clock() else found.key_hash

    def end(self, session: str) -> None:
        """End a session. Repeating it is harmless."""
        self._sessions.pop(hash_key(session), None)
