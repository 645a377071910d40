"""Logs as JSON lines: one object per line, control characters escaped, no secrets passed in."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path


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


def log_to(path: Path | None, level: int = logging.INFO) -> None:
    """Send this process's log records to `path`, or to standard error when None."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.StreamHandler(sys.stderr) if path is None else logging.FileHandler(path)
    handler.setFormatter(JsonLines())
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
