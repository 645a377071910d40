"""The commands that insitu's texts tell a user to run, as templates: `runs close …`, `promote …@STEP`.

A name in prose, as in "the key that `insitu serve` was started with", is no such command: it has no argument
and nothing introduces it. Docstrings are for readers of the code; those of commands are `--help`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click

from insitu.cli import cli

SOURCES = Path(__file__).resolve().parents[2] / "src" / "insitu"
_INSITU = re.compile(
    r"(?P<before>: |next: |`|; |^ *|or |see |with )\binsitu (?P<rest>[^`\n;,)]*)", re.MULTILINE
)
_INTRODUCED = (": ", "next: ", "see ")
_ARGUMENT = re.compile(r"^(-[\w-]+(=\S+)?|[A-Z][A-Z_@=]*|\S*[…@/{]\S*|\.\w*)$")


def printed_commands() -> Iterator[tuple[str, str]]:
    """Yield the file and the template of every command in a text."""
    for path in sorted(SOURCES.rglob("*.py")):
        for text in _texts(ast.parse(path.read_text())):
            for found in _INSITU.finditer(text):
                template, introduced = _template(found["rest"]), found["before"] in _INTRODUCED
                if template and (introduced or " " in template):
                    yield path.relative_to(SOURCES).as_posix(), template


def _template(rest: str) -> str | None:
    """Return the words of a command, without the prose after them; None if it is no command."""
    words = rest.split()
    command: click.Command | None = cli
    taken: list[str] = []
    while words and isinstance(command, click.Group):
        command = command.get_command(click.Context(command), words[0].rstrip("."))
        if command is not None:
            taken.append(words.pop(0).rstrip("."))
    if not taken:
        return None
    while words and _ARGUMENT.match(word := words.pop(0)):
        taken.append(word.rstrip(".'\""))
        if command is None or not word.startswith("-") or "=" in word or not words:
            continue
        if any(word in option.opts and not _is_flag(option) for option in command.params):
            taken.append(words.pop(0).rstrip(".'\""))
    return " ".join(taken)


def _is_flag(option: click.Parameter) -> bool:
    return isinstance(option, click.Option) and (option.is_flag or option.count)


def _texts(tree: ast.Module) -> Iterator[str]:
    """Yield every text but docstrings, with … for the parts that are filled in."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            pieces = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            skipped.update(node.values)
            yield "".join(str(piece) for piece in pieces)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield node.value
