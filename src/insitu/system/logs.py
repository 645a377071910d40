"""Logs as JSON lines: one object per line, control characters escaped, no secrets passed in."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

LOG_FILE = "INSITU_LOG_FILE"
"""Environment variable with the file that a process's standard error is appended to."""
MAX_LOG_BYTES = 32 * 2**20


class JsonLines(logging.Formatter):
    """One JSON object per line, so that a logged value cannot forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        line = {
            "at": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class RateLimit(logging.Filter):
    """Passes a burst of records from one place in the code, then a few per minute with a count of the rest.

    Anybody who reaches a port can cause some records again and again; they must not fill the disk.
    """

    def __init__(
        self, burst: int = 100, per_minute: float = 60.0, clock: Callable[[], float] = time.monotonic
    ):
        super().__init__()
        self._burst, self._per_second, self._clock = burst, per_minute / 60, clock
        self._places: dict[tuple[str, str, int], _Place] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        now = self._clock()
        key = (record.name, record.pathname, record.lineno)
        place = self._places.setdefault(key, _Place(float(self._burst), now))
        place.left = min(float(self._burst), place.left + (now - place.at) * self._per_second)
        place.at = now
        if place.left < 1:
            place.num_omitted += 1
            return False
        place.left -= 1
        if place.num_omitted:
            record.msg = f"{record.getMessage()} ({place.num_omitted} records from here were omitted)"
            record.args, place.num_omitted = (), 0
        return True


@dataclass(slots=True)
class _Place:
    left: float
    at: float
    num_omitted: int = 0


class BoundedStream(logging.StreamHandler[TextIO]):
    """Writes to standard error. A log file behind it, named by `LOG_FILE`, is cut when it becomes too large.

    What it held goes to `<name>.1`. The file is cut rather than renamed, because the process keeps it open
    for whatever else it prints.
    """

    def __init__(self, max_bytes: int = MAX_LOG_BYTES) -> None:
        super().__init__(sys.stderr)
        self._max_bytes = max_bytes
        name = os.environ.get(LOG_FILE)
        self._path = Path(name) if name else None

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, then cut the file if it is too large."""
        super().emit(record)
        if self._path is None:
            return
        try:
            if self._path.stat().st_size > self._max_bytes:
                shutil.copyfile(self._path, self._path.with_name(self._path.name + ".1"))
                os.truncate(self._path, 0)
        except OSError:
            self.handleError(record)


def log_to(path: Path | None, level: int = logging.INFO) -> None:
    """Send this process's log records to `path`, or to standard error when None."""
    if path is None:
        handler: logging.Handler = BoundedStream()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = RotatingFileHandler(path, maxBytes=MAX_LOG_BYTES, backupCount=1)
    handler.setFormatter(JsonLines())
    handler.addFilter(RateLimit())
    logging.basicConfig(level=level, handlers=[handler], force=True)


def vllm_logging_config() -> dict[str, object]:
    """Return a logging configuration that makes vLLM write JSON lines too."""
    handler = {"class": "logging.StreamHandler", "formatter": "json", "stream": "ext://sys.stderr"}
    quiet = {"handlers": ["json"], "level": "WARNING", "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": "insitu.system.logs.JsonLines"}},
        "handlers": {"json": handler},
        "root": {"handlers": ["json"], "level": "INFO"},
        "loggers": {
            "vllm": {"handlers": ["json"], "level": "INFO", "propagate": False},
            "uvicorn.access": quiet,
        },
    }
