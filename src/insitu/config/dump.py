"""A configuration as plain values: for files, for printing, for comparison."""

from __future__ import annotations

from typing import Any, cast

import yaml

from insitu.config.config import Config
from insitu.config.values.document import know_short_floats
from insitu.config.values.secret import hide


class _Dumper(yaml.SafeDumper):
    """Writes values so that the loader reads back the same ones."""


know_short_floats(_Dumper)


def dump_config(config: Config) -> dict[str, Any]:
    """Dump everything, defaults included, ready for JSON; every secret that is set becomes `**********`."""
    return cast("dict[str, Any]", hide(config.model_dump(mode="json", by_alias=True)))


def to_yaml(dump: dict[str, Any]) -> str:
    """Format a dump for printing, with the sections in their order."""
    return yaml.dump(dump, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
