"""The keys that a running process accepts: one from its environment, and those of its state directory.

request ─► holder ─► nobody: 401, by the door
             │  ─► an ended key: 401 with the reason
             └─ looked at keys.json within the last second? else: changed? ─► read it again
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from insitu.access.key_file import StoredKey, read_keys
from insitu.access.key_limits import KeyLimits
from insitu.access.projects import EVERYTHING, Project
from insitu.access.routes import Access, Need
from insitu.access.scopes import Scope, create_hint
from insitu.errors import Forbidden, InsituError, Unauthorized, Unavailable
from insitu.system.keys import hash_key

OWN_KEY = "INSITU_API_KEY"
"""The name of the key from the environment. No created key has it: their names are in lower case."""
MAX_AGE_SECONDS = 5.0
"""The file is read again after this time, even if it looks unchanged: clocks of file systems are coarse."""
_RETRY_SECONDS = 1.0
"""Pause before a file that could not be read is read again."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holder:
    """The sender of a request with a valid key."""

    key: str
    """The key's name, never the key itself."""
    scopes: frozenset[Scope]
    project: Project = EVERYTHING
    limits: KeyLimits | None = None
    """None for a key that was not created: its use is not counted."""

    def may(self, scope: Scope) -> bool:
        """Return True if the key has the scope, or `admin`."""
        return scope in self.scopes or Scope.ADMIN in self.scopes

    def require(self, need: Need, route: str) -> None:
        """Raise Forbidden if a route needs a scope that the key does not have, or a key of no project."""
        if need is Access.WHOLE:
            if self.project.name is not None:
                raise Forbidden(
                    f"{route} is for keys without a project; this key has the project {self.project.name!r}",
                    hint=create_hint([Scope.ADMIN]),
                )
            need = Scope.ADMIN
        if isinstance(need, Scope) and not self.may(need):
            has = ", ".join(sorted(self.scopes))
            raise Forbidden(
                f"{route} needs a key with the scope `{need}`; this key has: {has}", hint=create_hint([need])
            )


class Keyring:
    """Recognises keys by their hashes. Every request is compared with every key, in constant time."""

    def __init__(
        self, own_key: bytes, path: Path | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`own_key` is the hash of INSITU_API_KEY, which has every scope; `path` may not exist yet."""
        self._own_key = own_key
        self._path = path
        self._clock = clock
        self._read_at = float("-inf")
        self._seen: tuple[int, ...] | None = None
        self._keys: list[tuple[bytes, StoredKey]] = []
        self._readable = True

    def holder(self, given: Sequence[str]) -> Holder | None:
        """Return the holder of one of the given keys; None if none is known. Raise for an ended key."""
        return self.holder_by_hash([hash_key(key) for key in given])

    def holder_by_hash(self, digests: Sequence[bytes]) -> Holder | None:
        """Return the holder of a key whose hash is given: that of a session, for example."""
        self._look()
        found = [key for digest, key in self._keys if _among(digest, digests)]
        if _among(self._own_key, digests):
            return Holder(OWN_KEY, frozenset({Scope.ADMIN}))
        if not self._readable:
            raise Unavailable(
                "the backend cannot read its keys now", hint="its log names the cause; INSITU_API_KEY works"
            )
        now = time.time()
        valid = [key for key in found if key.ended_at(now) is None]
        if found and not valid:
            ended = "was revoked" if found[0].revoked_at is not None else "has expired"
            raise Unauthorized(f"the key {ended}", hint=create_hint(found[0].scopes))
        if not valid:
            return None
        key = valid[0]
        return Holder(key.name, frozenset(key.scopes), Project(key.project), key.limits)

    def _look(self) -> None:
        """Read the file again if it has changed or was read too long ago."""
        if self._path is None:
            return
        seen, now = _signature(self._path), self._clock()
        age = now - self._read_at
        if seen == self._seen and age < (MAX_AGE_SECONDS if self._readable else _RETRY_SECONDS):
            return
        changed = seen != self._seen
        self._seen, self._read_at = seen, now
        self._read(self._path, changed)

    def _read(self, path: Path, changed: bool) -> None:
        """Read the file; while it cannot be read, no key of it is accepted."""
        try:
            self._keys = [(bytes.fromhex(key.sha256), key) for key in read_keys(path)]
        except InsituError as error:
            if self._readable or changed:
                _log.error("%s", error)
            self._keys = []
            self._readable = False
        else:
            if changed or not self._readable:
                _log.info("%s: %d keys", path.name, len(self._keys))
            self._readable = True


def _signature(path: Path) -> tuple[int, ...]:
    """Return numbers that change with the file."""
    try:
        stat = path.stat()
    except OSError:  # not there; or reading it reports the cause
        return ()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _among(wanted: bytes, digests: Sequence[bytes]) -> bool:
    """Compare with every digest, however early one is equal."""
    same = False
    for digest in digests:
        same |= hmac.compare_digest(digest, wanted)
    return same
