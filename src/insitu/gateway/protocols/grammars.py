"""Bounds on the schemas and patterns that the engine's grammar compiler gets from a client.

A schema is bounded in bytes and depth, a pattern in length and written out; and all that one request has
the compiler work on is bounded in seconds, by an estimate that `tests/gates/test_grammar_seconds.py`
compares with the compiler.
"""

from __future__ import annotations

import json
import re
from typing import Any, cast

from insitu.errors import InvalidRequest
from insitu.gateway.shared.settings import Limits

_PATTERNS = ("pattern", "regex")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_PIECE = re.compile(
    r"\\.|\[(?:\\.|[^\]\\])*\]|\{(?P<least>\d+)?(?:(?P<comma>,)(?P<most>\d+)?)?\}|.",
    re.DOTALL,
)

# Seconds of one core, rounded up, of xgrammar 0.2.8 with a vocabulary of 49,152 tokens.
_UNROLLED = 128
"""Repetitions up to here are written out by the compiler."""
_SECONDS_OF_LENGTH = 0.015
"""Of each character that a string may have, up to `_UNROLLED`."""
_SECONDS_OF_REPEATS = 0.006
"""Of each pair of a repetition and a character that one may leave out, in a pattern."""
_SECONDS_OF_CHARACTER = 0.0005
"""Of each character of a pattern that is written out."""
_SECONDS_OF_COUNT = 0.6e-6
"""Of the square of a count beyond `_UNROLLED`."""
_SECONDS_OF_OPTIONAL = 15e-6
"""Of each pair of properties of an object that may be left out."""
_MOST_COUNTED = 10_000
"""A larger count is taken for this; where it repeats something, the pattern is too large anyway."""
_SECONDS_OF_ADDRESS, _SECONDS_OF_FORMAT, _SECONDS_OF_RANGE = 0.2, 0.05, 0.01
"""Of a string of a format such as `uri-template`, of another format, and of a number with bounds."""
_RANGE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def check_grammars(body: dict[str, Any], limits: Limits) -> None:
    """Reject a `response_format`, or the schema of a tool, whose grammar could exhaust the engine."""
    wanted = _Checked("response_format", limits)
    wanted.check(body.get("response_format"))
    _check_total("response_format", wanted.seconds, limits)
    given = body.get("tools")
    tools = [
        _Checked(f"tools[{index}]", limits)
        for index in range(len(cast("list[object]", given)) if isinstance(given, list) else 0)
    ]
    for checked, tool in zip(tools, cast("list[object]", given or []), strict=False):
        checked.check(tool)
    if (num_bytes := sum(tool.num_bytes for tool in tools)) > limits.max_tools_bytes:
        raise InvalidRequest(
            f"`tools` has {num_bytes} bytes of JSON; the limit is {limits.max_tools_bytes}.",
            hint="send fewer tools, or shorter descriptions",
        )
    if body.get("tool_choice") not in (None, "auto", "none") or any(tool.is_strict for tool in tools):
        _check_total("tools", wanted.seconds + sum(tool.seconds for tool in tools), limits)


def _check_total(name: str, seconds: float, limits: Limits) -> None:
    if seconds > limits.max_grammar_seconds:
        raise InvalidRequest(
            f"`{name}` would take the engine's grammar compiler about {seconds:.0f} s; the limit is "
            f"{limits.max_grammar_seconds:g}.",
            hint="limits on the length of strings cost most, then patterns with many repetitions and formats",
        )


class _Checked:
    """One schema of a request, under the name that its errors use."""

    def __init__(self, name: str, limits: Limits) -> None:
        self._name, self._limits = name, limits
        self.num_bytes = 0
        self.seconds = 0.0
        """The estimated time of the compiler."""
        self.is_strict = False

    def check(self, value: object) -> None:
        if not isinstance(value, dict | list):
            return  # missing, or of a type that the engine rejects without compiling it
        written = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        self.num_bytes = len(written.encode(errors="surrogatepass"))
        if self.num_bytes > self._limits.max_grammar_bytes:
            raise self._refusal(f"has {self.num_bytes} bytes of JSON", f"{self._limits.max_grammar_bytes}")
        self._walk(cast("object", value), 1)

    def _walk(self, value: object, depth: int) -> None:
        if depth > self._limits.max_grammar_depth:
            raise self._refusal("is nested too deep", f"{self._limits.max_grammar_depth} levels")
        if isinstance(value, dict):
            entries = cast("dict[str, object]", value)
            if entries.get("type") == "grammar" and "grammar" in entries:
                raise InvalidRequest(
                    f"`{self._name}` has a part of the type `grammar`, whose compilation has no bound.",
                    hint="describe it by a JSON schema or a pattern",
                )
            for key, item in entries.items():
                self._check_entry(key, item)
                self._walk_inner(item, depth)
            self.seconds += _seconds_of(entries)
        elif isinstance(value, list):
            for item in cast("list[object]", value):
                self._walk_inner(item, depth)

    def _walk_inner(self, value: object, depth: int) -> None:
        if isinstance(value, dict | list):
            self._walk(cast("object", value), depth + 1)

    def _check_entry(self, key: str, value: object) -> None:
        if key in _PATTERNS and isinstance(value, str):
            self._check_pattern(value)
        elif key == "patternProperties" and isinstance(value, dict):
            for pattern in cast("dict[str, object]", value):
                self._check_pattern(pattern)
        elif key == "strict" and value is True:
            self.is_strict = True
        elif key in _COUNTS and isinstance(value, int | float) and value > self._limits.max_pattern_size:
            raise self._refusal(f"has `{key}` {value}", f"{self._limits.max_pattern_size}")

    def _check_pattern(self, pattern: str) -> None:
        if len(pattern) > self._limits.max_pattern_chars:
            raise self._refusal(
                f"has a pattern of {len(pattern)} characters", f"{self._limits.max_pattern_chars}"
            )
        size = _expanded_size(pattern)
        if size > self._limits.max_pattern_size:
            raise self._refusal(
                f"has the pattern {pattern!r:.80}, whose repetitions multiply",
                f"{self._limits.max_pattern_size} characters written out",
            )
        self.seconds += _SECONDS_OF_CHARACTER * size + _seconds_of_repeats(pattern)

    def _refusal(self, found: str, limit: str) -> InvalidRequest:
        return InvalidRequest(f"`{self._name}` {found}; the limit is {limit}.", hint="send a smaller schema")


def _seconds_of(schema: dict[str, object]) -> float:
    """Return about how long the compiler takes for an object of a schema, without its patterns and parts."""
    longest = max(0.0, _number(schema, "minLength"), _number(schema, "maxLength"))
    form = str(schema.get("format") or "")
    properties, required = schema.get("properties"), schema.get("required")
    names = set(cast("dict[str, object]", properties)) if isinstance(properties, dict) else set[str]()
    if isinstance(required, list):
        names -= {name for name in cast("list[object]", required) if isinstance(name, str)}
    return (
        _SECONDS_OF_LENGTH * min(longest, _UNROLLED)
        + _SECONDS_OF_OPTIONAL * len(names) ** 2
        + (_SECONDS_OF_ADDRESS if form.startswith("uri") else _SECONDS_OF_FORMAT if form else 0.0)
        + _SECONDS_OF_RANGE * any(isinstance(schema.get(key), int | float) for key in _RANGE)
    )


def _number(schema: dict[str, object], key: str) -> float:
    value = schema.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def _seconds_of_repeats(pattern: str) -> float:
    num_repeats, num_optional, seconds = 0, 0.0, 0.0
    for piece in _PIECE.finditer(pattern):
        if piece[0] in "*+?":
            num_repeats += 1
            num_optional += 0.25
        elif piece[0][0] == "{" and len(piece[0]) > 1:
            least = min(int(piece["least"] or 0), _MOST_COUNTED)
            most = min(int(piece["most"] or least), _MOST_COUNTED)
            if most >= _UNROLLED:
                seconds += _SECONDS_OF_COUNT * most**2
            if piece["comma"]:
                num_repeats += 1
                num_optional += most - least if least < most < _UNROLLED else 1
    return seconds + _SECONDS_OF_REPEATS * num_repeats * num_optional


def _expanded_size(pattern: str) -> int:
    """Return about how many characters a pattern has if its counted repetitions are written out."""
    sizes, last = [0], 0  # one size per open group; `last` is what a repetition repeats
    for piece in _PIECE.finditer(pattern):
        times = int(piece["most"] or piece["least"] or 1)
        if piece[0] == "(":
            sizes.append(0)
            last = 0
            continue
        if piece[0] == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif piece[0][0] == "{" and len(piece[0]) > 1:
            sizes[-1] += last * (max(times, 1) - 1)
            last *= max(times, 1)
        else:
            sizes[-1] += 1
            last = 1
    return sum(sizes)
