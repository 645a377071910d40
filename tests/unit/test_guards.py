"""The list of guards that can be taken out, and SECURITY.md's table of them, agree with the sources."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.faults.guards import ROOT, Guard, guards, requirements, table, table_on_page, without_guard

OPTIONS = "[tool.pytest.ini_options]\naddopts = '--disable-plugin-autoload'\n"


@cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_guard_is_in_its_file_once() -> None:
    found = {each.name: (ROOT / each.file).read_text().count(each.text) for each in guards()}
    wrong = {name: number for name, number in found.items() if number != 1}
    assert not wrong, f"change their texts in tests/faults/guards.toml: {wrong}"


def test_every_named_test_exists() -> None:
    named = [each.test.partition("::") for each in guards()]
    missing = [f"{path}::{name}" for path, _, name in named if name not in functions_of(ROOT / path)]
    assert not missing, f"tests/faults/guards.toml names tests that are not there: {missing}"


@pytest.mark.parametrize("name", requirements())
def test_every_requirement_has_a_guard(name: str) -> None:
    assert [each for each in guards() if name in each.ids], f"{name}: {requirements()[name]}"


def test_the_list_is_the_one_of_the_audit() -> None:
    numbers = [f"D{number}" for number in range(1, 20)]
    numbers += [f"S{number}" for number in range(1, 29) if number != 23]  # S23 is tested in a browser
    assert list(requirements()) == numbers
    assert {each for guard in guards() for each in guard.ids} <= set(numbers)
    names = [each.name for each in guards()]
    assert len(set(names)) == len(names)


def test_the_page_has_the_table_of_the_list() -> None:
    assert table_on_page() == table(), "python -m tests.faults.guards --table"


@pytest.mark.parametrize(
    ("without", "outcome"),
    [("return x", "fails"), ("return max(x, 0) + 0", "passes"), ("return (", "exit code 4")],
)
def test_only_a_test_that_fails_counts(tmp_path: Path, without: str, outcome: str) -> None:
    (tmp_path / "pyproject.toml").write_text(OPTIONS)
    (tmp_path / "part.py").write_text("def f(x):\n    return max(x, 0)\n")
    (tmp_path / "test_part.py").write_text("from part import f\n\n\ndef test_f():\n    assert f(-1) == 0\n")
    test = "test_part.py::test_f"
    guard = Guard(("D1",), "no negative number", "part.py", "return max(x, 0)", without, test)
    assert without_guard(guard, tmp_path) == outcome
    assert (tmp_path / "part.py").read_text().endswith("return max(x, 0)\n"), "it is back in its place"
