"""A configuration as plain values: for files, for printing, for comparison."""

from __future__ import annotations

import yaml

from insitu.config.config import Config
from insitu.config.values.document import know_short_floats
from insitu.config.values.secret import hide
from insitu.json_values import JsonObject


class _Dumper(yaml.SafeDumper):
    """Writes values so that the loader reads back the same ones."""


know_short_floats(_Dumper)


def dump_config(config: Config) -> JsonObject:
    """Dump everything, defaults included, ready for JSON; every secret that is set becomes `**********`."""
    return hide(config.model_dump(mode="json", by_alias=True))


def to_yaml(dump: JsonObject) -> str:
    """Format a dump for printing, with the sections in their order."""
    return yaml.dump(dump, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
