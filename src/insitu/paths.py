"""Directories outside any checkout that can be rebuilt when missing."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Converted models and compiled kernels: ``INSITU_CACHE``, else ``~/.cache/insitu``."""
    return Path(os.environ.get("INSITU_CACHE") or Path.home() / ".cache" / "insitu")
