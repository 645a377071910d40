"""What no module does: let a model's files bring code, or build SQL from values."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import insitu

SOURCES = Path(insitu.__file__).parent
LOADERS = ("from_pretrained", "from_config")
OWN_MODELS = "testing/models.py"
"""Loads the models of the tests, whose files are known."""
STATEMENTS = ("text", "exec_driver_sql", "execute", "executemany", "executescript", "DDL")
LOCK = ("database/postgres.py", "exec_driver_sql(f'SELECT pg_advisory_xact_lock({key})')")
"""The key is an integer that is computed from a constant."""


def calls(*names: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call of a function or method with one of these names, and the module it is in."""
    for path in sorted(SOURCES.rglob("*.py")):
        source = path.read_text()
        if not any(f"{name}(" in source for name in names):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and name_of(node) in names:
                yield path.relative_to(SOURCES).as_posix(), node


def name_of(call: ast.Call) -> str | None:
    return getattr(call.func, "attr", None) or getattr(call.func, "id", None)


def test_every_loader_is_told_to_run_no_code_of_the_model() -> None:
    told = [
        (module, {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords})
        for module, call in calls(*LOADERS)
        if module != OWN_MODELS
    ]
    assert len(told) >= 4
    assert [module for module, given in told if given.get("trust_remote_code") != "False"] == []


def test_no_statement_is_built_from_values() -> None:
    built: list[tuple[str, str]] = []
    for module, call in calls(*STATEMENTS):
        statement = call.args[0] if call.args else None
        formatted = isinstance(statement, ast.Call) and name_of(statement) == "format"
        if formatted or isinstance(statement, ast.JoinedStr | ast.BinOp):
            built.append((module, f"{name_of(call)}({ast.unparse(statement)})"))
    assert built == [LOCK]


def test_no_name_is_checked_by_a_match_that_leaves_a_newline() -> None:
    """`$` also matches before a last newline, so names are checked with `fullmatch`."""
    methods = ((m, call) for m, call in calls("match") if isinstance(call.func, ast.Attribute))
    checked = {(module, ast.unparse(call.func)) for module, call in methods}
    assert checked == {
        ("compat/nemo/marked_text.py", "re.match"),
        ("rewards/judges/judge_prompt.py", "_FENCED.match"),
        ("workflow/kinds/json_path.py", "_STEP.match"),
    }
