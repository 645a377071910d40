"""Every test that SECURITY.md's table of guards names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def named_tests() -> list[tuple[str, str]]:
    page = (ROOT / "SECURITY.md").read_text()
    return _NAMED.findall(page.partition("\n## Guards and their tests\n")[2].partition("\n## ")[0])


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_named_test_exists() -> None:
    named = named_tests()
    assert len(named) >= 5
    missing = [f"{path}::{name}" for path, name in named if name not in functions_of(ROOT / path)]
    assert not missing, f"SECURITY.md names tests that are not there: {missing}"
