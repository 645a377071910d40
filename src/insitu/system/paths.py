"""Directories outside any checkout that can be rebuilt when missing."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache of converted models and compiled kernels: ``INSITU_CACHE`` or ``~/.cache/insitu``."""
    return Path(os.environ.get("INSITU_CACHE") or Path.home() / ".cache" / "insitu")
