"""How docstrings read: they open with a verb or a noun, never with a relative clause."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCES = sorted((Path(__file__).resolve().parents[2] / "src").rglob("*.py"))
STIFF = {"What", "That", "Which", "How", "Whether", "Where", "Who"}


def docstrings(path: Path) -> list[tuple[int, str]]:
    """The docstrings of a module: its own, of classes and functions, and of attributes."""
    bodies = [body for node in ast.walk(ast.parse(path.read_text())) if (body := getattr(node, "body", None))]
    statements = [statement for body in bodies if isinstance(body, list) for statement in body]
    constants = [each.value for each in statements if isinstance(each, ast.Expr)]
    texts = [each for each in constants if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return [(each.lineno, str(each.value).strip()) for each in texts]


def test_no_docstring_opens_with_a_relative_clause() -> None:
    stiff = [
        f"{path.name}:{line}: {text.splitlines()[0]}"
        for path in SOURCES
        for line, text in docstrings(path)
        if text.split(maxsplit=1)[0] in STIFF
    ]
    assert not stiff, "start with a verb in the imperative, or a noun:\n" + "\n".join(stiff)


def test_every_docstring_is_read() -> None:
    assert len(SOURCES) > 200
    assert sum(len(docstrings(path)) for path in SOURCES) > 1500
