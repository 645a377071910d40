"""Parse YAML text into plain values, typed once here: the rest of the package sees `JsonValue`."""

from __future__ import annotations

import re
from typing import Any, cast

import yaml

from insitu.errors import InvalidRequest
from insitu.json_values import JsonObject, JsonValue, as_object

_FLOAT_TAG = "tag:yaml.org,2002:float"
_SHORT_FLOAT = re.compile(r"^[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$")
_MAX_COPIED = 100_000
"""Values that aliases may add to a file, long texts counted as several."""
_VALUE_CHARS = 64
_YAML_HINT = "look at that line and the one before: indentation, quotes, a blank after each colon"
_SCALAR_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float")}


class _Loader(yaml.SafeLoader):
    """Also reads `1e-6` as a number, as YAML 1.2 does; PyYAML wants `1.0e-6`."""


def know_short_floats(reader_or_writer: type) -> None:
    """Make a loader read `1e-6` as a number, and a dumper quote strings that look like one."""
    cast("Any", reader_or_writer).add_implicit_resolver(_FLOAT_TAG, _SHORT_FLOAT, list("-+0123456789"))


know_short_floats(_Loader)


def read_document(text: str, where: str) -> JsonObject:
    """Parse the text as a mapping; otherwise InvalidRequest says why, with the line where known."""
    try:
        loader = cast("Any", _Loader(text))  # PyYAML's stubs leave these methods untyped
        node = loader.get_single_node()
        if node is not None:
            _check(node, where)
        document = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        said = error.problem or error.context or ""
        hint = "indent with spaces: YAML does not allow tabs" if r"'\t'" in said else _YAML_HINT
        raise InvalidRequest(f"{where}{place}: not valid YAML: {said}", hint=hint) from error
    except RecursionError:
        raise InvalidRequest(f"{where}: the values are nested too deep", hint="nest fewer levels") from None
    except (yaml.YAMLError, ValueError) as error:
        raise InvalidRequest(f"{where}: not valid YAML: {error}", hint=_YAML_HINT) from error
    if document is None:
        raise InvalidRequest(
            f"{where}: the file is empty",
            hint="start with `model`, `agent`, `data` and `reward` (docs/finetune.md)",
        )
    sections = as_object(document)
    if sections is None:
        kind = "a list" if isinstance(document, list) else f"the value {document!r}"
        raise InvalidRequest(
            f"{where}: the file holds {kind}, not a mapping of sections",
            hint="write `key: value` lines, such as `model: …`, without a dash before them",
        )
    return sections


def compose(text: str) -> yaml.Node | None:
    """Compose the nodes, with their positions, of a text that `read_document` accepts."""
    return cast("Any", yaml).compose(text, Loader=_Loader)


def read_scalar(text: str) -> JsonValue:
    """Read the text as a lone YAML scalar: null, a bool or a number; anything else stays text."""
    loader = cast("Any", _Loader(""))
    tag: str = loader.resolve(yaml.ScalarNode, text, (True, False))
    if tag not in _SCALAR_TAGS:
        return text
    try:
        return loader.construct_object(yaml.ScalarNode(tag, text))
    except ValueError:  # `0o9`, for example, looks like a number but is not one
        return text


def _check(root: yaml.Node, where: str) -> None:
    """Reject what YAML allows: duplicate keys, an anchor that contains itself, aliases that multiply."""
    repeated: list[str] = []
    sizes: dict[int, int] = {}  # of each node, with its aliases written out
    num_values = 0

    def visit(node: yaml.Node, above: frozenset[int]) -> int:
        nonlocal num_values
        if id(node) in above:
            raise yaml.constructor.ConstructorError(None, None, "an anchor contains itself", node.start_mark)
        if id(node) in sizes:
            return sizes[id(node)]
        own, inner = 1, 0
        if isinstance(node, yaml.ScalarNode):
            own += len(node.value) // _VALUE_CHARS
        elif isinstance(node, yaml.MappingNode):
            repeated.extend(_repeated_keys(node))
            inner = sum(visit(part, above | {id(node)}) for pair in node.value for part in pair)
        elif isinstance(node, yaml.SequenceNode):
            inner = sum(visit(value, above | {id(node)}) for value in node.value)
        num_values += own
        sizes[id(node)] = own + inner
        return sizes[id(node)]

    copied = visit(root, frozenset()) - num_values
    if copied > _MAX_COPIED:
        raise InvalidRequest(
            f"{where}: its aliases would expand to {copied:,} more values; the limit is {_MAX_COPIED:,}",
            hint="write the values out, or let fewer aliases (*name) name others",
        )
    if repeated:
        raise InvalidRequest(
            f"{where}: duplicate keys\n" + "\n".join(f"  {line}" for line in repeated),
            hint="keep one of each",
        )


def _repeated_keys(node: yaml.MappingNode) -> list[str]:
    first: dict[tuple[str, str], int] = {}
    repeated: list[str] = []
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in first:
                repeated.append(f"line {line}: `{key.value}`, already on line {first[name]}")
            first.setdefault(name, line)
    return repeated
