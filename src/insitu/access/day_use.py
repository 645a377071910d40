"""The use of every key on one day, in a file that survives a restart; each gateway and the API have one."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import orjson

from insitu.system.durable import write_atomic
from insitu.wire.message import Malformed, Message, read
from insitu.wire.values import Count, Name, Pattern

GATEWAY_USE_FILE = "usage-gateway.json"
API_USE_FILE = "usage-api.json"
DAY_SECONDS = 86_400
_MAX_BYTES = 1 << 20
_VERSION = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DayUse(Message):
    """The use of one key today."""

    requests: Count = 0
    """Requests that were let in."""
    rejected: Count = 0
    """Requests that a limit of the key turned away."""
    tokens: Count = 0
    bytes: Count = 0


@dataclass(frozen=True, slots=True)
class DayUseFile(Message):
    """The content of the file."""

    version: Literal[1]
    day: Annotated[str, Pattern(r"^\d{4}-\d\d-\d\d$")]
    """In UTC."""
    keys: dict[Name, DayUse]


def gateway_use_file(folder: Path, number: int) -> Path:
    """Return the file of one of the gateways; the first one is number 0."""
    path = folder / GATEWAY_USE_FILE
    return path.with_stem(f"{path.stem}-{number}") if number else path


def day_of(now: float) -> str:
    """Return the day of a time, in UTC."""
    return datetime.fromtimestamp(now, UTC).date().isoformat()


def read_day_use(path: Path, day: str) -> dict[str, DayUse]:
    """Return what was used that day: nothing if the file is of another day, or damaged, which is logged."""
    try:
        with path.open("rb") as opened:
            stored = read(DayUseFile, opened.read(_MAX_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, Malformed) as error:
        _log.error("%s cannot be read, so the keys' use of today counts from zero: %s", path, error)
        return {}
    return stored.keys if stored.day == day else {}


def write_day_use(path: Path, day: str, keys: dict[str, DayUse]) -> None:
    """Replace the file, durably."""
    content = orjson.dumps(DayUseFile(_VERSION, day, keys), option=orjson.OPT_APPEND_NEWLINE)
    write_atomic(path, content, mode=0o600)
