"""A configuration as plain values: for files, for printing, for comparison."""

from __future__ import annotations

from typing import Any, cast

import yaml

from insitu.config.config import Config
from insitu.config.document import know_short_floats
from insitu.config.secret import hide


class _Dumper(yaml.SafeDumper):
    """Writes what the loader reads back as the same values."""


know_short_floats(_Dumper)


def dump_config(config: Config) -> dict[str, Any]:
    """Everything, defaults included, ready for JSON; every secret that is set reads `**********`."""
    return cast("dict[str, Any]", hide(config.model_dump(mode="json", by_alias=True)))


def to_yaml(dump: dict[str, Any]) -> str:
    """A dump as it is printed: sections in their order."""
    return yaml.dump(dump, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
