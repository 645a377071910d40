"""Tests, benchmarks and tools find the names that they import from the project, also what CI does not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OWN = ("tests", "benchmarks", "tools", "examples")
FILES = sorted(path for folder in OWN for path in (ROOT / folder).rglob("*.py"))


def test_every_name_imported_from_the_project_is_there() -> None:
    imports = [(path, *entry) for path in FILES for entry in own_imports(path)]
    assert len(imports) > 100
    missing = [f"{path.relative_to(ROOT)}: {m}.{name}" for path, m, name in imports if not holds(m, name)]
    assert not missing


def test_a_name_that_is_gone_is_found() -> None:
    assert holds("tests.support.addition", "Rollouts")
    assert holds("tests.support", "addition")
    assert not holds("tests.support.addition", "gone")
    assert not holds("tests.support.gone", "Rollouts")


def own_imports(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("insitu", *OWN):
            for alias in node.names:
                yield node.module, alias.name


def holds(module: str, name: str) -> bool:
    """Whether a module binds the name at its top level, or a folder holds a module of that name."""
    place = ROOT.joinpath(*(["src"] if module.split(".")[0] == "insitu" else []), *module.split("."))
    if (place / f"{name}.py").is_file() or (place / name).is_dir():
        return True
    files = [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
    return any(name in bound(file) for file in files)


@cache
def bound(file: Path) -> set[str]:
    """The names that a file binds, inside functions too: enough to notice one that was removed."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
    return names
