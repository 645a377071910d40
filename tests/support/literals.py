"""The texts of a module as a user reads them."""

from __future__ import annotations

import ast


def literals(source: str) -> list[str]:
    """Return every text of a module, with … for what is filled in."""
    found: list[str] = []
    parts: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):  # a text comes before its parts
        if isinstance(node, ast.JoinedStr):
            pieces = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            found.append("".join(str(piece) for piece in pieces))
            parts.update(node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            found.append(node.value)
    return found
