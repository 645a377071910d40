"""Check whether two configurations describe the same run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from insitu.config.values.problems import Location, dotted

_MAY_CHANGE = re.compile(
    r"finetuning\.(num_epochs|output_dir|run_configuration\.(config_file|override))"
    r"|eval\.general\.max_concurrency"
    r"|trainer_adapters\..+\.backend\.(ip|port|api_key)"
    r"|llms\..+\.(base_url|api_key)"
    r"|.*\.(\w+_timeout_seconds|timeout_seconds|endpoint_timeout|request_timeout)"
)
"""Settings a resumed run may change: how long, how fast and through which address, not what is learnt.

Overrides need not be compared: their effect is in the configuration itself.
"""

_NOTHING = object()


def comparable(dump: Mapping[str, Any]) -> dict[str, Any]:
    """Strip a dump of what may change between resumptions, and of empty sections."""
    return cast("dict[str, Any]", _kept(dump, ()))


def fingerprint(dump: Mapping[str, Any]) -> str:
    """Hash a dump; dumps that `differences` finds equal have the same hash."""
    text = json.dumps(comparable(dump), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List the differences, one line each: `finetuning.seed: 0 → 3`."""
    before, after = dict(_leaves(comparable(old), ())), dict(_leaves(comparable(new), ()))
    places = [*before, *(place for place in after if place not in before)]
    return [
        f"{dotted(place)}: {_word(before.get(place, _NOTHING))} → {_word(after.get(place, _NOTHING))}"
        for place in places
        if _word(before.get(place, _NOTHING)) != _word(after.get(place, _NOTHING))
    ]


def _kept(value: Any, location: Location) -> Any:
    if not isinstance(value, Mapping):
        return value
    kept: dict[str, Any] = {}
    for key, each in cast("Mapping[str, Any]", value).items():
        place = (*location, key)
        if not _MAY_CHANGE.fullmatch(dotted(place)) and (inner := _kept(each, place)) != {}:
            kept[key] = inner
    return kept


def _leaves(value: Any, location: Location) -> Iterator[tuple[Location, Any]]:
    if isinstance(value, Mapping):
        for key, each in cast("Mapping[str, Any]", value).items():
            yield from _leaves(each, (*location, key))
    else:
        yield location, value


def _word(value: Any) -> str:
    return "not set" if value is _NOTHING else json.dumps(value, sort_keys=True, ensure_ascii=False)
