"""Take every guard of `guards.toml` out, one after another, and see its test fail.

    copy of the sources ─► all tests pass ─► for each guard: text replaced ─► its test fails ─► text restored

    python -m tests.faults.guards              # all of them
    python -m tests.faults.guards D5 S12       # those of two requirements
    python -m tests.faults.guards --table      # write the table of SECURITY.md

A guard counts as tested only if pytest reports failures: a text that breaks the import of a module shows
nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("guards.toml")
PAGE = ROOT / "SECURITY.md"
BEGIN, END = "<!-- table: written by tests.faults.guards --table -->\n", "<!-- end of the table -->\n"
_FOLDERS = ("src", "tests", "tools", "docs", "examples", "requirements", "deploy")
_FILES = ("pyproject.toml", "constraints.txt", "Makefile", "README.md", "SECURITY.md", "CONTRIBUTING.md")
_SECONDS = 180
"""Longest time of one test without its guard."""
_FAILED = 1
"""Pytest's exit code when tests ran and some failed."""


@dataclass(frozen=True, slots=True)
class Guard:
    """One guard, the text that holds it, and the test that needs it."""

    ids: tuple[str, ...]
    """The requirements that it is part of."""
    name: str
    file: str
    text: str
    without: str
    """Stands in place of the text once the guard is taken out."""
    test: str


def requirements() -> dict[str, str]:
    """Return every requirement by its id."""
    return tomllib.loads(LIST.read_text())["requirements"]


def guards() -> list[Guard]:
    """Return the guards in the order of the list."""
    rows = tomllib.loads(LIST.read_text())["guard"]
    return [Guard(**{**row, "ids": tuple(row["ids"])}) for row in rows]


def table() -> str:
    """Return the table of SECURITY.md."""
    rows = [f"| {', '.join(each.ids)} | {each.name} | `{each.test}` |" for each in guards()]
    return "\n".join(["", "| of | guard | test that fails without it |", "|---|---|---|", *rows, "", ""])


def table_on_page() -> str:
    """Return the table as SECURITY.md has it."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def write_table() -> None:
    """Replace the table of SECURITY.md."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the guards; return 1 if the test of one does not need it."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.guards")
    parser.add_argument("ids", nargs="*", help="requirements whose guards are tried; all by default")
    parser.add_argument("--named", default="", help="only guards with this in their name")
    parser.add_argument("--table", action="store_true", help="write the table of SECURITY.md and try nothing")
    given = parser.parse_args(arguments)
    if given.table:
        write_table()
        return 0
    wanted = [
        each
        for each in guards()
        if given.named in each.name and (not given.ids or set(given.ids) & set(each.ids))
    ]
    if not wanted:
        parser.error(f"no guard is part of {' '.join(given.ids)} with {given.named!r} in its name")
    with tempfile.TemporaryDirectory(prefix="insitu-guards-") as folder:
        place = _copied(Path(folder))
        return _try_all(wanted, place)


def _copied(place: Path) -> Path:
    """Copy what tests read; the environment stays where it is."""
    unwanted = shutil.ignore_patterns("__pycache__", ".hypothesis", "results")
    for name in _FOLDERS:
        shutil.copytree(ROOT / name, place / name, ignore=unwanted)
    for name in _FILES:
        shutil.copy(ROOT / name, place / name)
    return place


def _try_all(wanted: Sequence[Guard], place: Path) -> int:
    tests = list(dict.fromkeys(each.test for each in wanted))
    code, output = _tested(tests, place, seconds=_SECONDS * len(tests))
    if code != 0:
        print(output)
        print(f"with all guards in place the tests end with {code}: nothing can be told")
        return 1
    print(f"{len(tests)} tests pass with all guards in place", flush=True)
    not_needed: list[str] = []
    for each in wanted:
        began = time.monotonic()
        outcome = without_guard(each, place)
        print(
            f"{outcome:11} {time.monotonic() - began:5.1f} s  {' '.join(each.ids):12} {each.name}", flush=True
        )
        if outcome != "fails":
            not_needed.append(each.name)
    print(f"{len(wanted) - len(not_needed)} of {len(wanted)} guards: the test fails without it")
    return 1 if not_needed else 0


def without_guard(guard: Guard, place: Path) -> str:
    """Take the guard out, run its test and put the guard back; return what the test did."""
    path = place / guard.file
    whole = path.read_text()
    if whole.count(guard.text) != 1:
        return f"{whole.count(guard.text)} texts"
    path.write_text(whole.replace(guard.text, guard.without))
    try:
        code, output = _tested([guard.test], place, seconds=_SECONDS)
    finally:
        path.write_text(whole)
    if code == _FAILED:
        return "fails"
    if code == 0:
        return "passes"
    print(output)
    return f"exit code {code}"


def _tested(tests: Sequence[str], place: Path, *, seconds: float) -> tuple[int | None, str]:
    """Run tests in the copy; the code is None if they do not end in time."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "--tb=native"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    path = os.pathsep.join([str(place / "src"), str(place)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ran = subprocess.run(
            command,
            cwd=place,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # tests may print bytes that are no text
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return None, str(error)
    return ran.returncode, re.sub(r"\n{3,}", "\n\n", ran.stdout + ran.stderr)


if __name__ == "__main__":
    sys.exit(main())
