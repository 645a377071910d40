"""Bounds on the schemas and patterns that the engine's grammar compiler gets from a client."""

from __future__ import annotations

import json
import re
from typing import Any, cast

from insitu.errors import InvalidRequest
from insitu.gateway.shared.settings import Limits

_PATTERNS = ("pattern", "regex")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_PIECE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{(?P<least>\d+)?(?:,(?P<most>\d+)?)?\}|.", re.DOTALL)


def check_grammars(body: dict[str, Any], limits: Limits) -> None:
    """Reject a `response_format`, or the schema of a tool, whose grammar could exhaust the engine."""
    _Checked("response_format", limits).check(body.get("response_format"))
    tools = body.get("tools")
    for index, tool in enumerate(cast("list[object]", tools) if isinstance(tools, list) else []):
        _Checked(f"tools[{index}]", limits).check(tool)


class _Checked:
    """One schema of a request, under the name that its errors use."""

    def __init__(self, name: str, limits: Limits) -> None:
        self._name, self._limits = name, limits

    def check(self, value: object) -> None:
        if not isinstance(value, dict | list):
            return  # missing, or of a type that the engine rejects without compiling it
        written = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        if (num_bytes := len(written.encode(errors="surrogatepass"))) > self._limits.max_grammar_bytes:
            raise self._refusal(f"has {num_bytes} bytes of JSON", f"{self._limits.max_grammar_bytes}")
        self._walk(cast("object", value), 1)

    def _walk(self, value: object, depth: int) -> None:
        if depth > self._limits.max_grammar_depth:
            raise self._refusal("is nested too deep", f"{self._limits.max_grammar_depth} levels")
        if isinstance(value, dict):
            for key, item in cast("dict[str, object]", value).items():
                self._check_entry(key, item)
                self._walk_inner(item, depth)
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
        elif key in _COUNTS and isinstance(value, int | float) and value > self._limits.max_pattern_size:
            raise self._refusal(f"has `{key}` {value}", f"{self._limits.max_pattern_size}")

    def _check_pattern(self, pattern: str) -> None:
        if len(pattern) > self._limits.max_pattern_chars:
            raise self._refusal(
                f"has a pattern of {len(pattern)} characters", f"{self._limits.max_pattern_chars}"
            )
        if _expanded_size(pattern) > self._limits.max_pattern_size:
            raise self._refusal(
                f"has the pattern {pattern!r:.80}, whose repetitions multiply",
                f"{self._limits.max_pattern_size} characters written out",
            )

    def _refusal(self, found: str, limit: str) -> InvalidRequest:
        return InvalidRequest(f"`{self._name}` {found}; the limit is {limit}.", hint="send a smaller schema")


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
