"""The shape of the source: small folders and files, imports without cycles, few untyped values."""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "src" / "insitu"
FILES = sorted(ROOT.rglob("*.py"))
TESTS = Path(__file__).resolve().parents[1]

MODULES_PER_FOLDER = 15
MEDIAN_LINES = 120
P90_LINES = 250
ANY_PER_1000_LINES = 10
DICT_OF_ANY_PER_1000_LINES = 5
BROAD_EXCEPTS_PER_1000_LINES = 0.3

MANY_BY_NATURE = {"workflow/clients"}
"""Folders with one file per framework."""
DICTS_BY_NATURE = "gateway/protocols/"
"""Bodies of other people's protocols, passed on as they are."""
REASON_WORDS = 3

Graph = dict[str, set[str]]


def name_of(path: Path) -> str:
    """The path of a file from the root: `gateway/app.py`."""
    return path.relative_to(ROOT).as_posix()


def is_import(line: str) -> bool:
    return re.match(r"\s*(from|import) ", line) is not None


# Folders and files


def test_no_folder_holds_more_modules_than_a_reader_can_survey() -> None:
    modules: dict[str, list[str]] = {}
    for path in FILES:
        if path.stem not in ("__init__", "__main__"):
            modules.setdefault(name_of(path.parent), []).append(path.stem)
    full = {
        folder: len(names)
        for folder, names in modules.items()
        if len(names) > MODULES_PER_FOLDER and folder not in MANY_BY_NATURE
    }
    assert not full, f"more than {MODULES_PER_FOLDER} modules at one level: {full}"


def test_files_are_short() -> None:
    lengths = sorted(path.read_text().count("\n") for path in FILES)
    assert statistics.median(lengths) <= MEDIAN_LINES
    assert lengths[int(len(lengths) * 0.9)] <= P90_LINES


def test_no_two_files_of_tests_have_one_name() -> None:
    """Pytest imports them by name, and two folders in one run may each have a part of them."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    twice = sorted(name for name, times in names.items() if times > 1)
    assert not twice


# Imports


def runtime_imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run, inside functions too; not those for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from runtime_imports(other)
        else:
            yield from runtime_imports(child)


def module_name(path: Path) -> str:
    """The dotted name of a file; a package is its `__init__.py`."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(statement: ast.Import | ast.ImportFrom, known: set[str]) -> Iterator[str]:
    """The modules of the package that a statement names; the packages around them are not counted."""
    if isinstance(statement, ast.Import):
        names = [alias.name for alias in statement.names]
    else:
        assert statement.level == 0, f"a relative import: {ast.unparse(statement)}"
        base = statement.module or ""
        inner = [f"{base}.{alias.name}" for alias in statement.names]
        names = [each if each in known else base for each in inner]
    yield from (name for name in names if name in known)


@cache
def files_graph() -> Graph:
    known = {module_name(path) for path in FILES}
    graph: Graph = {}
    for path in FILES:
        own = module_name(path)
        tree = ast.parse(path.read_text())
        graph[own] = {name for each in runtime_imports(tree) for name in imported(each, known)} - {own}
    return graph


def folder_of(module: str) -> str:
    """The folder of a module; a module at the root is a room of its own."""
    path = ROOT.parent / Path(*module.split("."))
    folder = module if path.is_dir() else module.rpartition(".")[0]
    return module if folder == "insitu" else folder


def folders_graph() -> Graph:
    graph: Graph = {}
    for module, others in files_graph().items():
        folder = folder_of(module)
        graph.setdefault(folder, set()).update({folder_of(other) for other in others} - {folder})
    return graph


def cycles(graph: Graph) -> list[set[str]]:
    """Sets of nodes that all reach each other."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        ahead = [start]
        while ahead:
            new = graph[ahead.pop()] - found
            found |= new
            ahead += new
        return found

    reach = {node: reached(node) for node in graph}
    rings = {
        frozenset(other for other in reach[node] if node in reach[other])
        for node in graph
        if node in reach[node]
    }
    return [set(ring) for ring in rings]


def edges(ring: set[str], between: Callable[[str], str]) -> list[str]:
    """The imports that close a ring, to see which one to cut."""
    return sorted(
        f"{module} imports {other}"
        for module, others in files_graph().items()
        for other in others
        if between(module) != between(other) and {between(module), between(other)} <= ring
    )


def test_files_import_each_other_in_one_direction() -> None:
    found = ["\n".join(edges(ring, lambda module: module)) for ring in cycles(files_graph())]
    assert not found, "import cycles between files:\n" + "\n\n".join(found)


def test_folders_import_each_other_in_one_direction() -> None:
    found = ["\n".join(edges(ring, folder_of)) for ring in cycles(folders_graph())]
    assert not found, "import cycles between folders:\n" + "\n\n".join(found)


def test_a_cycle_would_be_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
    assert sum(len(others) for others in files_graph().values()) > 500


# Types and exceptions


def lines_of_code(path: Path) -> Iterable[str]:
    return (line for line in path.read_text().splitlines() if not is_import(line))


def per_1000_lines(pattern: str) -> tuple[float, list[str]]:
    """How often a pattern stands in 1,000 lines, and the files with most of it."""
    files = [path for path in FILES if not name_of(path).startswith(DICTS_BY_NATURE)]
    counts = {name_of(path): len(re.findall(pattern, "\n".join(lines_of_code(path)))) for path in files}
    total = sum(path.read_text().count("\n") for path in files)
    most = sorted((name for name in counts if counts[name]), key=lambda name: -counts[name])[:10]
    return sum(counts.values()) * 1000 / total, [f"{counts[name]} in {name}" for name in most]


BROAD = r"except (?:Exception|BaseException)\b|except:|except \([^)]*\b(?:Exception|BaseException)\b"


def test_values_have_types() -> None:
    found, most = per_1000_lines(r"\bAny\b|\bJson\b")
    assert found <= ANY_PER_1000_LINES, most


def test_messages_have_models() -> None:
    found, most = per_1000_lines(r"dict\[str, Any\]|Mapping\[str, Any\]|\bJson\b")
    assert found <= DICT_OF_ANY_PER_1000_LINES, most


def test_exceptions_are_named() -> None:
    found, most = per_1000_lines(BROAD)
    assert found <= BROAD_EXCEPTS_PER_1000_LINES, most


def reason_in(line: str) -> str:
    """The words of a line's comment, without the codes of the linter."""
    comment = line.partition("#")[2]
    return re.sub(r"noqa: [A-Z0-9, ]+\b|pyright: ignore\S*", "", comment).strip(" -#")


def without_reason(text: str) -> list[int]:
    """The lines of broad excepts with no comment beside them that says why."""
    lines = text.splitlines()
    return [
        number
        for number, line in enumerate(lines, start=1)
        if re.search(BROAD, line)
        and not any(
            len(reason_in(each).split()) >= REASON_WORDS for each in lines[max(0, number - 2) : number + 1]
        )
    ]


def test_every_broad_except_says_why() -> None:
    silent = [f"{name_of(path)}:{number}" for path in FILES for number in without_reason(path.read_text())]
    assert not silent, "give the reason beside it: " + ", ".join(silent)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("try:\n    f()\nexcept Exception:  # noqa: BLE001\n    pass", [3]),
        ("try:\n    f()\nexcept Exception:\n    raise", [3]),
        ("try:\n    f()\nexcept Exception:  # noqa: BLE001 - user code may raise anything\n    pass", []),
        ("try:\n    f()\nexcept (Exception, SystemExit):\n    # user code may raise anything\n    pass", []),
        ("try:\n    f()\nexcept ValueError:\n    pass", []),
    ],
)
def test_a_code_of_the_linter_is_no_reason(text: str, wanted: list[int]) -> None:
    assert without_reason(text) == wanted
