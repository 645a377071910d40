"""The subset of JSON paths that a result needs: ``$``, ``$.a.b``, ``$.a[0]``, ``$['a b']``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from insitu.errors import InvalidRequest
from insitu.json_values import JsonValue

_STEP = re.compile(
    r"""
    \.(?P<name>[^.\[\]\s'"]+)
    | \[(?P<index>-?\d+)\]
    | \['(?P<single>[^']*)'\]
    | \["(?P<double>[^"]*)"\]
    """,
    re.VERBOSE,
)
_SHOWN_KEYS = 10


@dataclass(frozen=True, slots=True)
class JsonPath:
    """One location in a JSON value."""

    text: str
    steps: tuple[str | int, ...]

    @classmethod
    def parse(cls, text: str) -> JsonPath:
        """Parse a path; reject unknown syntax and show where it starts."""
        if not text.startswith("$"):
            raise InvalidRequest(f"the JSON path `{text}` does not start with `$`", hint=_HINT)
        steps: list[str | int] = []
        position = 1
        while position < len(text):
            step = _STEP.match(text, position)
            if step is None:
                raise InvalidRequest(
                    f"the JSON path `{text}` is not understood from `{text[position:]}` on", hint=_HINT
                )
            steps.append(_key(step))
            position = step.end()
        return cls(text, tuple(steps))

    def extract(self, value: JsonValue) -> JsonValue:
        """Return the element at this path in `value`."""
        for number, step in enumerate(self.steps):
            try:
                value = _descend(value, step)
            except LookupError:
                raise InvalidRequest(
                    f"the result has nothing at `{self.text}`: "
                    f"`{_shown(self.steps[:number])}` is {_describe(value)}",
                    hint="correct result_json_path",
                ) from None
        return value


def extract(path: str, value: JsonValue) -> JsonValue:
    """Return the element at `path` in `value`."""
    return JsonPath.parse(path).extract(value)


_HINT = "write it like $.answer, $.choices[0].text or $['my key']"


def _key(step: re.Match[str]) -> str | int:
    if step["index"] is not None:
        return int(step["index"])
    return next(text for text in (step["name"], step["single"], step["double"]) if text is not None)


def _descend(value: JsonValue, step: str | int) -> JsonValue:
    if isinstance(step, int):
        if isinstance(value, list):
            return value[step]
    elif isinstance(value, dict):
        return value[step]
    raise LookupError


def _shown(steps: tuple[str | int, ...]) -> str:
    return "$" + "".join(f"[{step!r}]" for step in steps)


def _describe(value: JsonValue) -> str:
    if isinstance(value, dict):
        keys = ", ".join(f"`{key}`" for key in list(value)[:_SHOWN_KEYS])
        more = ", …" if len(value) > _SHOWN_KEYS else ""
        return f"an object with the keys {keys}{more}" if value else "an empty object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "null" if value is None else f"a {type(value).__name__}"
