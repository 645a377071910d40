"""A configuration as plain values: for files, for printing, for comparison."""

from __future__ import annotations

from typing import Any, cast

from insitu.config.config import Config
from insitu.config.secret import hide


def dump_config(config: Config) -> dict[str, Any]:
    """Everything, defaults included, ready for JSON; every secret that is set reads `**********`."""
    return cast("dict[str, Any]", hide(config.model_dump(mode="json", by_alias=True)))
