"""Spans in the JSON of OTLP over HTTP, as OpenTelemetry collectors and Langfuse take them."""

from __future__ import annotations

import hashlib
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import orjson

from insitu.json_values import JsonObject, JsonValue, as_list, parse_json

_SECONDS = 20.0
_MAX_TEXT_CHARS = 100_000
INTERNAL, CLIENT = 1, 3
"""Kinds of a span: work of this process, a call to another one."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span; an attribute that is None is left out."""

    trace: str
    id: str
    name: str
    began: float
    """Unix time."""
    seconds: float
    attributes: Mapping[str, object]
    parent: str | None = None
    kind: int = INTERNAL
    error: str = ""
    """The reason of a failure; empty if there was none."""
    lists: frozenset[str] = field(default=frozenset())
    """The attributes that are lists of texts; every other value that is not plain becomes JSON text."""

    def to_json(self) -> JsonObject:
        """Return the span as OTLP has it."""
        values = {name: value for name, value in self.attributes.items() if value is not None}
        span: JsonObject = {
            "traceId": self.trace,
            "spanId": self.id,
            "name": self.name,
            "kind": self.kind,
            "startTimeUnixNano": str(int(self.began * 1e9)),
            "endTimeUnixNano": str(int((self.began + self.seconds) * 1e9)),
            "attributes": [_attribute(name, each, name in self.lists) for name, each in values.items()],
        }
        if self.parent is not None:
            span["parentSpanId"] = self.parent
        if self.error:
            span["status"] = {"code": 2, "message": self.error[:_MAX_TEXT_CHARS]}
        return span


def trace_id(rollout_id: str) -> str:
    """Return the trace of a rollout: 32 hexadecimal digits, the same each time, so that it is there once."""
    return hashlib.sha256(rollout_id.encode()).hexdigest()[:32]


def span_id(call_id: str) -> str:
    """Return the span of a call: 16 hexadecimal digits."""
    return hashlib.sha256(call_id.encode()).hexdigest()[:16]


def traces(spans: Iterable[Span], resource: Mapping[str, object]) -> JsonObject:
    """Return the body of a request."""
    scope: JsonObject = {"scope": {"name": "insitu"}, "spans": [span.to_json() for span in spans]}
    described: list[JsonValue] = [_attribute(name, value, False) for name, value in resource.items()]
    return {"resourceSpans": [{"resource": {"attributes": described}, "scopeSpans": [scope]}]}


def post(url: str, body: JsonObject, headers: Mapping[str, str]) -> JsonValue:
    """Send JSON to an address that was checked; return the answer's."""
    request = urllib.request.Request(  # noqa: S310 - the address was checked
        url,
        data=orjson.dumps(body),
        headers={"Content-Type": "application/json", **headers},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:  # noqa: S310 - as above
        content = answer.read()
    return parse_json(content) if content else None


def _attribute(name: str, value: object, is_list: bool) -> JsonObject:
    return {"key": name, "value": _value(value, is_list)}


def _value(value: object, is_list: bool) -> JsonObject:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if is_list and (items := as_list(value)) is not None:
        return {"arrayValue": {"values": [{"stringValue": str(item)} for item in items]}}
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return {"stringValue": text[:_MAX_TEXT_CHARS]}
