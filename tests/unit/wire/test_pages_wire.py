"""web/src/wire.ts declares what the models of `wire/views` say.

A field that is renamed, missing or has another type fails here, not on a page.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from insitu.wire import answers
from insitu.wire.message import Answer, schema_of
from insitu.wire.views import backend, compare, groups, rollouts, runs

DECLARED = (Path(__file__).parents[3] / "web" / "src" / "wire.ts").read_text()
OTHER_NAMES: dict[str, type[Answer]] = {
    "RunList": runs.RunListView,
    "Store": runs.StoreView,
    "Verdict": runs.VerdictView,
    "Gain": runs.GainView,
    "TreeBranch": groups.Branch,
    "Session": backend.SessionView,
    "BackendRun": answers.RunInfo,
    "Checkpoint": answers.CheckpointInfo,
    "Promotion": answers.PromotionInfo,
    "Step": answers.StepInfo,
}
"""Interfaces that are not called as their model."""
UNREAD: dict[str, set[str]] = {
    "CallView": {"sampling", "started_at", "timings"},
    "RunEvent": {"at", "store", "stores"},
    "StepPoint": {"metrics"},
    "ValidationPoint": {"at", "standard_error"},
}
"""Fields of views that no page reads."""


def models() -> dict[str, type[Answer]]:
    found: dict[str, type[Answer]] = {}
    for module in (backend, compare, groups, rollouts, runs):
        for name, each in inspect.getmembers(module, inspect.isclass):
            if issubclass(each, Answer) and each.__module__ == module.__name__:
                found[name] = each
    return found


def fields(body: str) -> dict[str, str]:
    """The fields of an interface or of an inline object, with their types."""
    body = re.sub(r"/\*.*?\*/|//[^\n]*", "", body, flags=re.S)
    parts = [part.strip() for part in split(body, ";")]
    return {
        name.strip().rstrip("?"): kind.strip() for name, _, kind in (p.partition(":") for p in parts if p)
    }


def split(text: str, at: str) -> list[str]:
    """Split at a character that is not within brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "({[<") - (character in ")}]>")
        if character == at and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def interfaces() -> dict[str, dict[str, str]]:
    found = re.findall(r"^export interface (\w+) \{\n(.*?)^\}", DECLARED, flags=re.S | re.M)
    return {name: fields(body) for name, body in found}


INTERFACES = interfaces()


MODELS = models() | OTHER_NAMES


class Difference(AssertionError):
    """The declaration and the model say different things."""


class Comparison:
    """Compares declarations with the JSON schema of one model."""

    def __init__(self, model: type[Answer]) -> None:
        self.schema: dict[str, Any] = dict(schema_of(model, "#/$defs/{model}"))

    def resolved(self, schema: Any) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self.schema["$defs"][schema["$ref"].rpartition("/")[2]]
        return schema

    def interface(self, declared: dict[str, str], schema: Any, where: str) -> None:
        known = self.resolved(schema).get("properties", {})
        for name, kind in declared.items():
            if name not in known:
                raise Difference(f"{where}.{name} is in no message; it has {', '.join(sorted(known))}")
            self.value(kind, known[name], f"{where}.{name}")

    def value(self, kind: str, schema: Any, where: str) -> None:
        schema = self.resolved(schema)
        if kind == "Json":
            return
        variants = [self.resolved(each) for each in schema.get("anyOf", [schema])]
        may_be_null = any(each.get("type") == "null" for each in variants)
        variants = [each for each in variants if each.get("type") != "null"]
        kinds = [each.strip() for each in split(kind, "|") if each.strip()]
        if may_be_null != ("null" in kinds):
            says = "may be null" if may_be_null else "is never null"
            raise Difference(f"{where}: {kind} is declared, but the message {says}")
        kinds = [each for each in kinds if each != "null"]
        for variant in variants:
            self.one(kinds, variant, where)

    def one(self, kinds: list[str], schema: dict[str, Any], where: str) -> None:
        said = schema.get("type", "any")
        first = kinds[0]
        if first.endswith("[]"):
            self.expect(said == "array", kinds, said, where)
            inner = first[:-2]
            self.value(inner[1:-1] if inner.startswith("(") else inner, schema["items"], f"{where}[]")
        elif first.startswith("{"):
            self.expect(said == "object", kinds, said, where)
            self.interface(fields(first[1:-1]), schema, where)
        elif first in INTERFACES:
            self.expect(said == "object", kinds, said, where)
            self.interface(INTERFACES[first], schema, where)
        elif first in ("Counts", "JsonObject"):
            self.expect(said == "object", kinds, said, where)
        elif first.startswith('"'):
            given = schema.get("enum", [schema.get("const")])
            self.expect({f'"{each}"' for each in given} == set(kinds), kinds, str(given), where)
        else:
            of_schema = {"integer": "number"}.get(said, said)
            self.expect(of_schema == first, kinds, said, where)

    def expect(self, holds: bool, kinds: list[str], said: str, where: str) -> None:
        if not holds:
            raise Difference(f"{where}: {' | '.join(kinds)} is declared, the message has {said}")


def check(name: str, declared: dict[str, str]) -> None:
    comparison = Comparison(MODELS[name])
    comparison.interface(declared, comparison.schema, name)


@pytest.mark.parametrize("name", sorted(INTERFACES))
def test_every_declared_field_is_in_the_message_with_its_type(name: str) -> None:
    check(name, INTERFACES[name])


def unread() -> Iterator[tuple[str, str]]:
    for name, declared in INTERFACES.items():
        model = MODELS[name]
        if model.__module__ != answers.__name__:  # of other routes, the pages take what they need
            known = Comparison(model).schema["properties"]
            yield from ((name, each) for each in known if each not in declared)


def test_every_field_of_a_view_is_declared() -> None:
    found: dict[str, set[str]] = {}
    for name, each in unread():
        found.setdefault(name, set()).add(each)
    assert found == UNREAD


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("RolloutRow", {"advantages": "number | null"}),
        ("RolloutRow", {"reward": "number"}),
        ("RolloutRow", {"rollout_id": "string | null"}),
        ("RolloutRow", {"policy_steps": "string[]"}),
        ("TreeSpan", {"kind": '"context" | "sampled" | "read"'}),
        ("TreeView", {"advantages": "number[][]"}),
        ("GroupView", {"tree": "RolloutRow"}),
        ("FleetView", {"processes": "{ name: string; process: number | null }[]"}),
    ],
)
def test_a_difference_is_seen(name: str, changed: dict[str, str]) -> None:
    with pytest.raises(Difference):
        check(name, INTERFACES[name] | changed)


def test_the_declarations_were_read() -> None:
    assert len(INTERFACES) > 30
    assert INTERFACES["FleetView"]["jobs"] == "Counts"
    assert all(declared for declared in INTERFACES.values())
