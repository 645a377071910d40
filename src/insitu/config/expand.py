"""Rewrite the keys of the short form as the sections that they stand for."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from insitu.config.short_form import PLACES, as_short
from insitu.config.short_values import CannotRead, long_value
from insitu.config.values.problems import Location, Problem
from insitu.config.values.tree import put, value_at
from insitu.json_values import JsonObject, JsonValue, as_object

Override = tuple[str, str]
_WHOLE_SECTIONS = ("trajectory_builders", "trainer_adapters")
"""Beside an entry of these, a short key would make a second one that nothing names."""


@dataclass(slots=True)
class Expanded:
    """A file in its long form, and the way back to what it says."""

    source: JsonObject
    texts: dict[Location, str] = field(default_factory=dict[Location, str])
    """Text of the whole-value interpolations, by their new location."""
    written: dict[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """The short keys of the file, with their values."""
    made: set[str] = field(default_factory=set[str])
    """Sections of components that were filled in."""
    problems: list[Problem] = field(default_factory=list[Problem])

    def owns(self, section: str) -> bool:
        """Return True if the section was made here, or one of the short keys names its entry."""
        return section in self.made or any(PLACES[key][0] == section for key in self.written)

    def as_written(self, problem: Problem) -> Problem:
        """Name the short key where the problem lies in what it stands for."""
        location = as_short(problem.location, self.written)
        if location != problem.location and not isinstance(self.written[str(location[0])], dict):
            location = location[:1]
        return replace(problem, location=location)


def expand(document: JsonObject, texts: Mapping[Location, str], overrides: Iterable[Override]) -> Expanded:
    """Return the long form; overrides of whole short keys come first, as if the file said so."""
    written = {key: document[key] for key in PLACES if document.get(key) is not None}
    moved = {(key,): text for key in written if (text := texts.get((key,))) is not None}
    written |= {key: moved[(key,)] for key in written if (key,) in moved and key != "num_generations"}
    written |= {path: _number(path, text) for path, text in overrides if path in PLACES}
    sections = {key: value for key, value in document.items() if key not in PLACES}
    result = Expanded(copy.deepcopy(sections), written=written)
    result.texts = {_long(location): text for location, text in texts.items() if location not in moved}
    for key, value in written.items():
        if (taken := _taken(sections, key)) is not None:
            result.problems.append(Problem((key,), f"says the same as `{taken}`: keep one of the two"))
        else:
            _expand(key, value, result)
    return result


def long_overrides(overrides: Iterable[Override]) -> list[Override]:
    """Return the overrides that `expand` left, each with its path in the long form."""
    left = [(path.split("."), text) for path, text in overrides if path not in PLACES]
    return [(".".join(str(part) for part in _long(tuple(parts))), text) for parts, text in left]


def _long(location: Location) -> Location:
    return (*PLACES.get(str(location[0]), location[:1]), *location[1:]) if location else location


def _number(key: str, text: str) -> JsonValue:
    return int(text) if key == "num_generations" and text.isdecimal() else text


def _expand(key: str, value: JsonValue, result: Expanded) -> None:
    place = PLACES[key]
    holder: JsonValue = result.source
    for depth, part in enumerate(place[:-1], 1):
        inside = as_object(holder)
        if inside is None:
            result.problems.append(Problem(place[: depth - 1], "should be a mapping"))
            return
        if inside.get(str(part)) is None:
            inside[str(part)] = {}
        holder = inside[str(part)]
    try:
        put(result.source, place, copy.deepcopy(long_value(key, value)))
    except CannotRead as error:
        result.problems.append(Problem((key,), str(error)))
    except TypeError:
        result.problems.append(Problem(place[:-1], "should be a mapping"))


def _taken(sections: JsonObject, key: str) -> str | None:
    """Return the section of the file that says already what the key stands for."""
    place = PLACES[key]
    if place[0] in _WHOLE_SECTIONS:
        return str(place[0]) if sections.get(str(place[0])) else None
    try:
        found = value_at(sections, place)
    except LookupError:
        return None
    return None if found is None else ".".join(str(part) for part in place)
