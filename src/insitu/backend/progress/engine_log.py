"""The last words of an engine, from its log."""

from __future__ import annotations

from pathlib import Path

import orjson

from insitu.system.processes import tail

_MAX_CHARS = 120


def last_message(log: Path) -> str:
    """Return the latest line of a log, or its message if it is in JSON, and where the log is."""
    lines = [line for line in tail(log).splitlines() if line.strip()] if log.exists() else []
    return f"{_message(lines[-1])} ({log})" if lines else str(log)


def _message(line: str) -> str:
    try:
        text = str(orjson.loads(line)["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        text = line
    flat = " ".join(text.split())
    return flat if len(flat) <= _MAX_CHARS else f"{flat[: _MAX_CHARS - 1]}…"
