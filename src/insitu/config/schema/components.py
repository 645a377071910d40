"""The schema of an entry whose `_type` selects its class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from insitu.config.defaults import NATIVE
from insitu.config.short_values import GUESSES
from insitu.json_values import JsonObject, JsonValue
from insitu.plugins import Component, Kind

_TYPE = "_type"
_KINDS_WITH_A_DEFAULT = (Kind.TRAJECTORY_BUILDER, Kind.TRAINER_ADAPTER, Kind.TRAINER)
"""An entry of these that has no `_type` is insitu's own."""


SHORT_KINDS = {"agent": Kind.WORKFLOW, "data": Kind.DATASET, "reward": Kind.EVALUATOR}
"""Short keys whose mapping is an entry."""


def long_entry(kind: Kind) -> JsonObject:
    """Return the schema of an entry in the long form."""
    if kind in _KINDS_WITH_A_DEFAULT:
        return {"$ref": f"#/$defs/{kind}"}
    if kind is Kind.SINK:  # a lone `_type` will do
        return {"anyOf": [{"type": "string"}, {"$ref": f"#/$defs/{kind}"}]}
    return {"allOf": [{"$ref": f"#/$defs/{kind}"}, {"required": [_TYPE]}]}


def short_entry(key: str) -> JsonObject:
    """Return the schema of a short key's mapping, whose other keys may leave no doubt about its `_type`."""
    enough: list[JsonValue] = [{"required": [each]} for each in (_TYPE, *GUESSES[key])]
    return {"allOf": [{"$ref": f"#/$defs/{SHORT_KINDS[key]}"}, {"anyOf": enough}]}


def entry_schema(kind: Kind, components: Sequence[Component], titles: Mapping[type, str]) -> JsonObject:
    """Return the schema of an entry of this kind; a `_type` of a plugin that is not installed may be any."""
    by_config: dict[type, list[str]] = {}
    for component in components:
        by_config.setdefault(component.config, []).append(component.type_name)
    known: list[JsonValue] = [component.type_name for component in components]
    return {
        "description": f"A {kind.replace('_', ' ')}; `_type` selects its settings.",
        "type": ["object", "null"] if kind in _KINDS_WITH_A_DEFAULT else "object",
        "properties": {
            _TYPE: {
                "description": f"Known: {', '.join(map(str, known))}; packages may add others.",
                "anyOf": [{"enum": known}, {"type": "string"}],
            }
        },
        "allOf": [
            {"if": _selects(kind, names), "then": {"$ref": f"#/$defs/{titles[config]}"}}
            for config, names in by_config.items()
        ],
    }


def _selects(kind: Kind, names: Sequence[str]) -> JsonObject:
    """Return the condition under which an entry is of one of these types, stated or not."""
    stated: JsonObject = {
        "type": "object",
        "properties": {_TYPE: {"enum": list(names)}},
        "required": [_TYPE],
    }
    unstated: JsonObject = {"type": "object", "not": {"required": [_TYPE]}}
    if kind in _KINDS_WITH_A_DEFAULT:
        return {"anyOf": [stated, unstated]} if NATIVE in names else stated
    guessed = [_guess(key, kind) for key, types in _guesses(kind).items() if set(types) & set(names)]
    return {"anyOf": [stated, *guessed]} if guessed else stated


def _guess(key: str, kind: Kind) -> JsonObject:
    """Return the condition under which a key selects the type: no `_type` and no key before it does."""
    keys = list(_guesses(kind))
    before: list[JsonValue] = [{"required": [each]} for each in (_TYPE, *keys[: keys.index(key)])]
    return {"required": [key], "not": {"anyOf": before}}


def _guesses(kind: Kind) -> Mapping[str, Sequence[str]]:
    short = next((key for key, of in SHORT_KINDS.items() if of is kind), "")
    return GUESSES.get(short, {})
