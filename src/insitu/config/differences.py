"""Check whether two configurations describe the same run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator

from insitu.config.values.problems import Location, dotted
from insitu.json_values import JsonObject, JsonValue

_MAY_CHANGE = re.compile(
    r"finetuning\.(num_epochs|max_steps|output_dir|run_configuration\.(config_file|override))"
    r"|eval\.general\.max_concurrency"
    r"|sinks"
    r"|trainer_adapters\..+\.backend\.(ip|port|tls|api_key)"
    r"|llms\..+\.(base_url|api_key)"
    r"|.*\.(\w+_timeout_seconds|timeout_seconds|endpoint_timeout|request_timeout)"
)
"""Settings a resumed run may change: how long, how fast and through which address, not what is learnt.

Overrides need not be compared: their effect is in the configuration itself.
"""
_ALWAYS_MEANT = {
    re.compile(r"trainer_adapters\..+\.training\.method"): "grpo",
    re.compile(r"finetuning\.schedule"): "synchronous",
}
"""Settings that earlier releases did not have, with the value that their runs have had all along."""
_NOTHING = object()


def comparable(dump: JsonObject) -> JsonObject:
    """Strip a dump of what may change between resumptions, of empty sections and of settings without a value.

    A release that adds a setting with None as its default thus resumes the runs of earlier ones; so does one
    whose default is what was always meant.
    """
    return _kept_keys(dump, ())


def fingerprint(dump: JsonObject) -> str:
    """Hash a dump; dumps that `differences` finds equal have the same hash."""
    text = json.dumps(comparable(dump), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def differences(old: JsonObject, new: JsonObject) -> list[str]:
    """List the differences, one line each: `finetuning.seed: 0 → 3`."""
    before, after = dict(_leaves(comparable(old), ())), dict(_leaves(comparable(new), ()))
    places = [*before, *(place for place in after if place not in before)]
    return [
        f"{dotted(place)}: {_word(before.get(place, _NOTHING))} → {_word(after.get(place, _NOTHING))}"
        for place in places
        if _word(before.get(place, _NOTHING)) != _word(after.get(place, _NOTHING))
    ]


def _kept_keys(values: JsonObject, location: Location) -> JsonObject:
    kept: JsonObject = {}
    for key, value in values.items():
        place = (*location, key)
        if _MAY_CHANGE.fullmatch(dotted(place)):
            continue
        inner = _kept_keys(value, place) if isinstance(value, dict) else value
        if inner != {} and inner is not None and not _always_meant(place, inner):
            kept[key] = inner
    return kept


def _always_meant(place: Location, value: JsonValue) -> bool:
    return any(found.fullmatch(dotted(place)) and value == meant for found, meant in _ALWAYS_MEANT.items())


def _leaves(value: JsonValue, location: Location) -> Iterator[tuple[Location, JsonValue]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(each, (*location, key))
    else:
        yield location, value


def _word(value: object) -> str:
    return "not set" if value is _NOTHING else json.dumps(value, sort_keys=True, ensure_ascii=False)
