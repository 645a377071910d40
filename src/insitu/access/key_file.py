"""The file of a state directory's keys: `keys.json`, readable by its owner only."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import orjson
from annotated_types import MaxLen, MinLen

from insitu.access.key_limits import KeyLimits
from insitu.access.scopes import Scope
from insitu.errors import Unavailable
from insitu.system.durable import write_atomic
from insitu.wire.message import Malformed, Message, read
from insitu.wire.values import Name, Pattern

KEYS_FILE = "keys.json"
MAX_KEYS = 1000
"""Every request is compared with every key, so their number has a bound."""
_MAX_BYTES = 1 << 20
_VERSION = 1
_Sha256 = Annotated[str, Pattern(r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True)
class StoredKey(Message):
    """One key, by its hash. An ended one is kept for a while, so that its holder is told why."""

    name: Name
    sha256: _Sha256
    scopes: Annotated[list[Scope], MinLen(1), MaxLen(len(Scope))]
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    limits: KeyLimits = field(default_factory=KeyLimits)
    project: Name | None = None
    """The project whose runs and calls the key reaches; None: all of them."""

    def ended_at(self, now: float) -> float | None:
        """Return when the key was revoked or expired; None while it is valid."""
        past = [at for at in (self.revoked_at, self.expires_at) if at is not None and at <= now]
        return min(past, default=None)

    def state(self, now: float) -> str:
        """Return `active`, `revoked` or `expired`; a key that was both is revoked."""
        if self.revoked_at is not None:
            return "revoked"
        return "active" if self.ended_at(now) is None else "expired"


@dataclass(frozen=True, slots=True)
class KeyFile(Message):
    """The content of the file."""

    version: Literal[1]
    keys: Annotated[list[StoredKey], MaxLen(MAX_KEYS)]


def read_keys(path: Path) -> list[StoredKey]:
    """Return the stored keys; none if there is no file."""
    try:
        with path.open("rb") as opened:
            content = opened.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise Malformed(f"over {_MAX_BYTES} bytes")
        return read(KeyFile, content).keys
    except FileNotFoundError:
        return []
    except (OSError, Malformed) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise Unavailable(
            f"{path}: the keys cannot be read: {why}",
            hint="restore the file; or delete it and create the keys again, while INSITU_API_KEY still works",
        ) from error


def write_keys(path: Path, keys: list[StoredKey]) -> None:
    """Replace the file, durably."""
    content = orjson.dumps(KeyFile(_VERSION, keys), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    write_atomic(path, content, mode=0o600)
