"""Edit YAML text without touching any other character: comments, order and quoting stay.

Every edit is verified: the new text must parse to the old values with exactly that change.
What cannot be edited this way (a key that comes from an anchor, for example) is left alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import yaml

from insitu.config.values.document import compose, read_document
from insitu.config.values.problems import Location
from insitu.config.values.tree import put, remove, section, value_at
from insitu.errors import InvalidRequest
from insitu.json_values import JsonObject, JsonValue

_PLAIN = re.compile(r"[A-Za-z][\w./-]*|\d+(\.\d+){3}")


@dataclass(slots=True)
class _Entry:
    """One key of a mapping and its surroundings."""

    key: yaml.ScalarNode
    value: yaml.Node
    holder: yaml.MappingNode
    outer_line: int | None
    """Line of the outermost flow collection around it; None in block style."""


class MarkedText:
    """A YAML text and the values in it."""

    def __init__(self, text: str, where: str) -> None:
        self._where = where
        self.text = text if text.endswith("\n") else text + "\n"
        self.document = read_document(self.text, where)
        self._entries = _index(self.text)

    def line(self, location: Location) -> int | None:
        """Return the line, counted from 1, of a location or of the nearest enclosing one that has a key."""
        for length in range(len(location), 0, -1):
            entry = self._entries.get(location[:length])
            if entry is not None:
                return entry.key.start_mark.line + 1
        return None

    def drop(self, location: Location, reason: str) -> bool:
        """Comment out a key, with the reason above it; in flow style, remove it. False if that fails."""
        location = self._whole_block(location)
        entry = self._entries.get(location)
        if entry is None:
            return False
        name, expected = location[-1], self._copy()
        remove(expected, location)
        if entry.outer_line is None:
            new = _commented(self.text, entry, f"# insitu migrate: {reason}")
        else:
            new = _taken_out(self.text, entry, f"# insitu migrate: `{name}` is left out: {reason}")
        return new is not None and self._accept(new, expected)

    def replace(self, location: Location, value: str) -> bool:
        """Replace a scalar with another string."""
        entry = self._entries.get(location)
        if entry is None or not isinstance(entry.value, yaml.ScalarNode):
            return False
        expected = self._copy()
        put(expected, location, value)
        plain = entry.value.style is None and _PLAIN.fullmatch(value) is not None
        written = value if plain else json.dumps(value, ensure_ascii=False)
        start, end = entry.value.start_mark.index, entry.value.end_mark.index
        return self._accept(self.text[:start] + written + self.text[end:], expected)

    def rename(self, location: Location, name: str) -> bool:
        """Rename a key."""
        entry = self._entries.get(location)
        holder = section(value_at(self.document, location[:-1]))
        if entry is None or name in holder:
            return False
        expected = self._copy()
        put(expected, (*location[:-1], name), remove(expected, location))
        start, end = entry.key.start_mark.index, entry.key.end_mark.index
        return self._accept(self.text[:start] + name + self.text[end:], expected)

    def _whole_block(self, location: Location) -> Location:
        """Return the location, or its block's if it is the only key there: an empty block would be null."""
        entry = self._entries.get(location)
        if entry is None or entry.outer_line is not None or len(entry.holder.value) > 1 or len(location) < 2:
            return location
        return self._whole_block(location[:-1])

    def _copy(self) -> JsonObject:
        return {key: _apart(each) for key, each in self.document.items()}

    def _accept(self, text: str, expected: JsonObject) -> bool:
        try:
            document = read_document(text, self._where)
        except InvalidRequest:
            return False
        if document != expected:
            return False
        self.text, self.document, self._entries = text, document, _index(text)
        return True


def _commented(text: str, entry: _Entry, comment: str) -> str | None:
    lines = text.splitlines(keepends=True)
    first = entry.key.start_mark.line
    indent = lines[first][: entry.key.start_mark.column]
    if indent.strip():  # `- key: value`, for example
        return None
    end = _end_line(entry.value, first)
    while end > first + 1 and _is_blank_or_comment(lines[end - 1]):
        end -= 1  # blank lines and comments after the value belong to the next key
    out = [f"{indent}{comment}\n"]
    for line in lines[first:end]:
        body = line.removeprefix(indent)
        out.append(f"{indent}# {body}" if body.strip() else f"{indent}#\n")
    return "".join([*lines[:first], *out, *lines[end:]])


def _end_line(value: yaml.Node, first: int) -> int:
    """Return the line after the value's last one."""
    mark = value.end_mark
    in_block = (isinstance(value, yaml.CollectionNode) and not value.flow_style) or (
        isinstance(value, yaml.ScalarNode) and value.style in ("|", ">")
    )
    return max(first + 1, mark.line if in_block else mark.line + 1)


def _taken_out(text: str, entry: _Entry, comment: str) -> str:
    pairs = cast("list[tuple[yaml.Node, yaml.Node]]", entry.holder.value)
    place = next(number for number, (key, _) in enumerate(pairs) if key is entry.key)
    start, end = entry.key.start_mark.index, entry.value.end_mark.index
    if place + 1 < len(pairs):
        end = pairs[place + 1][0].start_mark.index
    elif place:
        start = pairs[place - 1][1].end_mark.index
    lines = (text[:start] + text[end:]).splitlines(keepends=True)
    outer = entry.outer_line or 0
    indent = re.match(r"[ ]*", lines[outer])
    lines.insert(outer, f"{indent[0] if indent else ''}{comment}\n")
    return "".join(lines)


def _is_blank_or_comment(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


def _index(text: str) -> dict[Location, _Entry]:
    root = compose(text)
    return {} if root is None else dict(_entries(root, (), None, set()))


def _entries(
    node: yaml.Node, location: Location, outer_line: int | None, seen: set[int]
) -> Iterator[tuple[Location, _Entry]]:
    if id(node) in seen:  # an alias: its text is elsewhere
        return
    seen.add(id(node))
    if isinstance(node, yaml.CollectionNode) and node.flow_style and outer_line is None:
        outer_line = node.start_mark.line
    if isinstance(node, yaml.MappingNode):
        for key, value in cast("list[tuple[yaml.Node, yaml.Node]]", node.value):
            if isinstance(key, yaml.ScalarNode):
                place = (*location, str(key.value))
                yield place, _Entry(key, value, node, outer_line)
                yield from _entries(value, place, outer_line, seen)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(cast("list[yaml.Node]", node.value)):
            yield from _entries(value, (*location, number), outer_line, seen)


def _apart(value: JsonValue) -> JsonValue:
    """Copy the value so that an anchor and its aliases share nothing."""
    if isinstance(value, dict):
        return {key: _apart(each) for key, each in value.items()}
    return [_apart(each) for each in value] if isinstance(value, list) else value
