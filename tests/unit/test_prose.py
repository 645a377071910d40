"""Prose reads like natural English: docstrings, pages and error texts, by tests/support/prose_rules.py."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from insitu import errors
from tests.support.prose_rules import RULES, Rule

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PROGRAMS = [*sorted((ROOT / "examples").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
STIFF = {"What", "That", "Which", "How", "Whether", "Where", "Who"}
MAX_LINE = 120


@cache
def docstrings(path: Path) -> list[tuple[int, str]]:
    """The docstrings of a module: its own, of classes and functions, and of attributes."""
    bodies = [body for node in nodes(path) if (body := getattr(node, "body", None))]
    statements = [statement for body in bodies if isinstance(body, list) for statement in body]
    constants = [each.value for each in statements if isinstance(each, ast.Expr)]
    texts = [each for each in constants if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return [(each.lineno, str(each.value).strip()) for each in texts]


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def broken(text: str) -> Iterator[str]:
    """A message for every rule that the text breaks."""
    for rule in RULES:
        if rule.breaks(text):
            yield f"{text.strip()!r}\n    as in {rule.bad!r}\n    better: {rule.good!r}"


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines of a page outside code blocks, with their numbers."""
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield number, line


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, list items and table rows on one line each, without headings and inline code."""
    start, parts = 0, list[str]()
    for number, line in [*prose_lines(text), (0, "")]:
        begins = re.match(r"\s*(?:[-*] |\d+\. |\||#|$)", line)
        if begins and parts:
            yield start, re.sub(r"`[^`]*`", "`…`", " ".join(parts))
            parts = []
        if line.strip() and not line.startswith("#"):
            start = start if parts else number
            parts.append(line.strip())


def slips_of_page(path: Path) -> list[str]:
    """Every rule that a page breaks, with its place and a better wording."""
    lines = paragraphs(path.read_text())
    return [f"{path.name}:{number}: {slip}" for number, line in lines for slip in broken(line)]


def long_lines(path: Path) -> list[int]:
    """Lines over the limit, tables and the targets of links apart."""
    lines = prose_lines(path.read_text())
    return [
        number
        for number, line in lines
        if not line.startswith("|") and len(re.sub(r"\]\([^)]*\)", "]", line)) > MAX_LINE
    ]


@cache
def error_texts(path: Path) -> list[tuple[int, str]]:
    """String literals given to the exceptions of `insitu.errors`, and every `hint=`."""
    found: list[tuple[int, str]] = []
    for node in nodes(path):
        if isinstance(node, ast.Call):
            given = [each.value for each in node.keywords if each.arg == "hint"]
            if getattr(node.func, "id", getattr(node.func, "attr", None)) in error_names():
                given += node.args
            found += [(value.lineno, text) for value in given if (text := literal(value))]
    return found


@cache
def error_names() -> frozenset[str]:
    return frozenset(name for name, _ in inspect.getmembers(errors, inspect.isclass))


def literal(value: ast.expr) -> str:
    """The text of a string, with `…` for everything that is filled in."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    if isinstance(value, ast.JoinedStr):
        return "".join(literal(part) or "…" for part in value.values)
    if isinstance(value, ast.BinOp):
        return literal(value.left) + literal(value.right)
    return ""


def test_no_docstring_opens_with_a_relative_clause() -> None:
    stiff = [
        f"{path.name}:{line}: {text.splitlines()[0]}"
        for path in [*SOURCES, *PROGRAMS]
        for line, text in docstrings(path)
        if text.split(maxsplit=1)[0] in STIFF
    ]
    assert not stiff, "start with a verb in the imperative, or a noun:\n" + "\n".join(stiff)


def test_every_docstring_is_read() -> None:
    assert len(SOURCES) > 200
    assert sum(len(docstrings(path)) for path in SOURCES) > 1500


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_reads_well(path: Path) -> None:
    slips = slips_of_page(path)
    assert not slips, "\n".join(slips)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_are_short(path: Path) -> None:
    long = long_lines(path)
    assert not long, f"{path.name}: wrap these lines at {MAX_LINE} characters: {long}"


def test_error_texts_read_well() -> None:
    texts = [(path.name, line, text) for path in SOURCES for line, text in error_texts(path)]
    slips = [f"{name}:{line}: {slip}" for name, line, text in texts for slip in broken(text)]
    assert not slips, "\n".join(slips)


def test_error_texts_are_found() -> None:
    assert sum(len(error_texts(path)) for path in SOURCES) > 300


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.bad)
def test_a_rule_finds_its_sample_and_accepts_the_better_wording(rule: Rule) -> None:
    assert rule.breaks(rule.bad)
    assert not list(broken(rule.good))


def test_a_planted_slip_is_found_with_its_place_and_a_better_wording(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    code = "```\nUnknown keys are refused.\n```"
    page.write_text(f"# What is fine\n\n{code}\n\nA key is read. Keys that are\nunknown are refused.\n")
    (slip,) = slips_of_page(page)
    assert slip.startswith("page.md:7: ")
    assert "better: 'Unknown keys are rejected.'" in slip


def test_a_planted_long_line_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    link = f"[a link]({'x' * MAX_LINE}.md)"
    page.write_text(f"# Page\n\n{'word ' * 30}\n\n| {'cell ' * 30} |\n\n```\n{'x' * 200}\n```\n\n{link}\n")
    assert long_lines(page) == [3]


def test_a_planted_error_text_is_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('raise errors.InvalidRequest(f"key {name} " + "is refused", hint=f"put {it} back")\n')
    texts = [text for _, text in error_texts(module)]
    assert sorted(texts) == ["key … is refused", "put … back"]
    assert all(list(broken(text)) for text in texts)
