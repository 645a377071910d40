"""Field docs: the docstrings below the fields of a model, read from its source."""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path

from insitu.config.values.shape import fields_of


def field_docs(model: type[object]) -> dict[str, str]:
    """Return the docstring of each field that has one; an inherited field keeps that of its own class."""
    docs: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if each is not object:
            docs |= _own_docs(each)
    return {name: docs[name] for name in fields_of(model) if name in docs}


def _own_docs(model: type[object]) -> dict[str, str]:
    try:
        file = inspect.getsourcefile(model)
    except TypeError:  # a class of Python itself
        return {}
    if file is None or not Path(file).is_file():
        return {}
    return _docs_of_module(file).get(model.__qualname__, {})


@functools.cache
def _docs_of_module(file: str) -> dict[str, dict[str, str]]:
    """Read the classes at the top of a module."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return {node.name: _docs_of_class(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _docs_of_class(node: ast.ClassDef) -> dict[str, str]:
    found: dict[str, str] = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            text = below.value.value
            if isinstance(text, str):
                found[field.target.id] = " ".join(text.split())
    return found
