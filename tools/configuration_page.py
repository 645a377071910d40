"""Write docs/configuration.md, the table of every setting, from docs/schema.json.

python tools/configuration_page.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
SCHEMA = ROOT / "docs" / "schema.json"
OPENING = """# Every setting

This page lists every setting of the configuration file, with its type and default. It is written from
[the schema](schema.json), which is written from the code. [The loop](finetune.md) explains what the settings
do, and [first steps](first-steps.md#check-the-file-in-your-editor) how an editor checks them.

The settings from `model` to `training` are [the short form](finetune.md#the-short-form), the others the long
one. X stands for a name of your choice. `${VAR}` or `${VAR:-default}` may stand for any value.
"""

Schema = dict[str, Any]
SHORT = ("model", "agent", "data", "validation", "reward", "num_generations", "backend", "training")


@dataclass(frozen=True, slots=True)
class Section:
    """One mapping of the configuration: where it is written, its definitions' names, and its schema."""

    path: str
    names: tuple[str, ...]
    schema: Schema


def page(schema: Schema) -> str:
    """Return the page: the top level, then every mapping in the order in which it is first named."""
    found = list(sections(schema))
    places: dict[str, str] = {}
    for each in found:
        for name in each.names:
            places.setdefault(name, anchor(title(each)))
    parts = [OPENING, table(top_level(schema), places)]
    parts += [f"## {title(each)}\n\n{about(each)}{table(each.schema, places)}" for each in found]
    return "\n".join(parts)


def top_level(schema: Schema) -> Schema:
    """The short form first."""
    properties = schema["properties"]
    ordered = [*SHORT, *(name for name in properties if name not in SHORT)]
    return {**schema, "properties": {name: properties[name] for name in ordered}}


def sections(schema: Schema) -> Iterator[Section]:
    """Give every definition once, at the path by which it is reached first; the long form names the paths."""
    definitions, seen = schema["$defs"], {"variable"}
    long = {name: of for name, of in schema["properties"].items() if name not in SHORT}
    waiting = sorted(long.items(), key=lambda each: each[0] == "functions")  # `workflow` names their kind
    while waiting:
        path, of = waiting.pop(0)
        is_map = isinstance(of.get("additionalProperties"), dict)
        for name in named(of):
            if name in seen:
                continue
            seen.add(name)
            here = f"{path}.X" if is_map else path
            definition = definitions[name]
            if is_kind(definition):
                for types, settings in variants(definition):
                    if settings in seen:
                        continue
                    seen.add(settings)
                    yield Section(f"{here} of type {types}", (name, settings), definitions[settings])
                    waiting = children(here, definitions[settings]) + waiting
                continue
            yield Section(here, (name,), definition)
            waiting = children(here, definition) + waiting


def children(path: str, definition: Schema) -> list[tuple[str, Schema]]:
    return [(f"{path}.{name}", of) for name, of in definition.get("properties", {}).items()]


def is_kind(definition: Schema) -> bool:
    """Whether `_type` chooses among the settings of several components."""
    return any("if" in rule for rule in definition.get("allOf", []))


def variants(kind: Schema) -> Iterator[tuple[str, str]]:
    """Give the `_type` names of a kind of component, and the definition of their settings."""
    for rule in kind["allOf"]:
        condition = rule["if"]
        typed = [
            each for each in condition.get("anyOf", [condition]) if "_type" in each.get("properties", {})
        ]
        for each in typed:
            names = each["properties"]["_type"].get("enum", [])
            yield ", ".join(names), rule["then"]["$ref"].rpartition("/")[2]


def named(of: Any) -> Iterator[str]:
    """Give the names of the definitions that a setting refers to."""
    if isinstance(of, dict):
        for key, value in of.items():
            if key == "$ref":
                yield value.rpartition("/")[2]
            else:
                yield from named(value)
    elif isinstance(of, list):
        for each in of:
            yield from named(each)


def title(section: Section) -> str:
    return f"`{section.path}`" if " " not in section.path else re.sub(r"^(\S+)", r"`\1`", section.path)


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def about(section: Section) -> str:
    text = section.schema.get("description", "")
    return "" if not text or text.startswith(("`trainer", "`trajectory")) else f"{text}\n\n"


def table(schema: Schema, places: dict[str, str]) -> str:
    """Return the settings of one mapping as a table, or a line that there are none."""
    required = schema.get("required", [])
    rows: list[str] = []
    for name, of in schema.get("properties", {}).items():
        if name != "_type":
            said = (
                f"`{name}`",
                kind(of, places),
                default(of, name in required),
                cell(of.get("description", "")),
            )
            rows.append(f"| {' | '.join(said)} |")
    if not rows:
        return "It has no settings.\n"
    return "\n".join(["| setting | type | default | |", "|---|---|---|---|", *rows, ""])


def kind(of: Schema, places: dict[str, str]) -> str:
    """Say what a setting may be, with links to the mappings."""
    return " or ".join(dict.fromkeys(kinds(of, places)))


def kinds(of: Schema, places: dict[str, str]) -> Iterator[str]:
    if "$ref" in of:
        name = of["$ref"].rpartition("/")[2]
        if name != "variable":
            yield f"[mapping](#{places[name]})"
    elif "enum" in of:
        yield ", ".join(f"`{cell(json.dumps(value))}`" for value in of["enum"])
    elif "const" in of:
        yield f"`{cell(json.dumps(of['const']))}`"
    elif "anyOf" in of or "oneOf" in of:
        for each in of.get("anyOf") or of["oneOf"]:
            yield from kinds(each, places)
    elif "allOf" in of:
        yield from kinds(of["allOf"][0], places)
    elif of.get("type") == "array":
        items = of.get("items", {})
        inner = kind({"anyOf": items} if isinstance(items, list) else items, places)
        yield f"list of {inner}" if inner else "list"
    elif of.get("type") == "object":
        values = of.get("additionalProperties")
        inner = kind(values, places) if isinstance(values, dict) else ""
        yield f"map of names to {inner}" if inner else "map"
    elif of.get("type") == "string":
        yield "text"
    elif of.get("type") in ("integer", "number"):
        yield " ".join(["integer" if of["type"] == "integer" else "number", *bounds(of)])
    elif of.get("type") == "boolean":
        yield "true or false"
    elif of.get("type") != "null":
        yield "any value"


def bounds(of: Schema) -> list[str]:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return [f"{sign} {of[name]}" for name, sign in signs.items() if name in of]


def default(of: Schema, required: bool) -> str:
    if required:
        return "required"
    value = of.get("default")
    return "" if value is None else f"`{cell(json.dumps(value))}`"


def cell(text: str) -> str:
    """Escape what would end a cell, and outside code what would be a tag."""
    plain = re.sub(r"(`[^`]*`)|<", lambda found: found[1] or r"\<", text)
    return plain.replace("|", r"\|").replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(SCHEMA.read_text())))
