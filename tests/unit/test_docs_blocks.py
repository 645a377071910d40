"""Code blocks of the README and the docs: YAML fits the schema, Python and shell parse, commands exist.

So do the commands in the texts that insitu prints.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml

from insitu.cli import cli
from insitu.config.values.document import read_document
from insitu.system.torch_builds.installing import TORCH_CPU_INDEX
from tests.support.literals import literals

PRINTED = re.compile(r"(: |`|next: )?\binsitu ([a-z]+(?: (?:-[\w-]+(?:=\S+)?|[A-Z…<]\S*|\S*[./@…]\S*))*)")
ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
SCHEMA = json.loads((ROOT / "docs" / "schema.json").read_text())


@dataclass(frozen=True)
class Block:
    """One code block, with its page and line for messages."""

    where: str
    language: str
    text: str


def blocks() -> Iterator[Block]:
    for path in PAGES:
        page = path.read_text()
        for found in BLOCK.finditer(page):
            line = page.count("\n", 0, found.start()) + 1
            text = re.sub(rf"^{found[1]}", "", found[3], flags=re.MULTILINE)
            yield Block(f"{path.relative_to(ROOT)}:{line}", found[2], text)


BLOCKS = list(blocks())


def of(language: str) -> Any:
    return pytest.mark.parametrize(
        "block", [block for block in BLOCKS if block.language == language], ids=lambda block: block.where
    )


def test_there_are_blocks_of_every_language() -> None:
    assert {"bash", "json", "python", "yaml"} <= {block.language for block in BLOCKS}


@of("yaml")
def test_yaml_fits_the_schema(block: Block) -> None:
    if isinstance(yaml.safe_load(block.text), dict):
        document = read_document(block.text, block.where)
        if set(document) <= set(SCHEMA["properties"]):
            jsonschema.validate(document, SCHEMA)


@of("python")
def test_python_parses(block: Block) -> None:
    ast.parse(block.text)


@of("json")
def test_json_parses(block: Block) -> None:
    try:
        json.loads(block.text)
    except json.JSONDecodeError:
        for line in block.text.splitlines():
            json.loads(line)


@of("bash")
def test_shell_parses(block: Block) -> None:
    checked = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True, timeout=30)
    assert checked.returncode == 0, checked.stderr


@of("bash")
def test_commands_exist_with_their_options(block: Block) -> None:
    for words in commands(block.text):
        check_command(words)


def test_every_line_that_installs_the_cpu_backend_names_the_index_of_its_torch() -> None:
    pages = [*PAGES, *(ROOT / "src").rglob("*.md"), *(ROOT / "deploy").rglob("*")]
    lines = [
        (path.name, line)
        for path in pages
        if path.is_file()
        for line in path.read_text().splitlines()
        if "install" in line and "backend-cpu" in line and "decisions" not in path.parts
    ]
    assert len(lines) >= 5
    assert [each for each in lines if f"--extra-index-url {TORCH_CPU_INDEX} " not in each[1]] == []


def commands(text: str) -> Iterator[list[str]]:
    """Give the words of every `insitu` command, without what the shell does with it."""
    for line in text.replace("\\\n", " ").splitlines():
        if not re.match(r"^(\S*=\S+ )*(\S*/)?insitu( |$)", line.strip()):
            continue
        words = shlex.split(re.sub(r"\$\([^)]*\)", "value", line), comments=True)
        words = words[next(i for i, word in enumerate(words) if word.endswith("insitu")) + 1 :]
        stops = [i for i, word in enumerate(words) if word in ("|", ">", "2>", "&", "&&", ";")]
        yield words[: min(stops, default=len(words))]


def check_command(words: list[str]) -> None:
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, found, words = command.resolve_command(context, words)
        assert found is not None, name
        command, context = found, click.Context(found, info_name=name, parent=context)
    command.make_parser(context).parse_args(list(words))


@pytest.mark.parametrize("line", ["insitu finetun", "insitu finetune --no-such-option", "insitu runs lst"])
def test_wrong_commands_are_found(line: str) -> None:
    (words,) = commands(line)
    with pytest.raises(click.UsageError):
        check_command(words)


def printed_commands() -> Iterator[tuple[str, list[str]]]:
    """Give the commands in the texts of the code; of prose ("insitu reads …") only what names a command."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        for text in literals(path.read_text()):
            for found in PRINTED.finditer(text):
                words = [word.strip("`'\",;:.)") for word in found[2].split()]
                if words[0] in cli.list_commands(click.Context(cli)) or (found[1] and len(words) > 1):
                    yield f"{path.relative_to(ROOT)}: {found[0]}", [word or "…" for word in words]


def mentioned(words: list[str]) -> None:
    """Check a command that a text may name without the value of its last option: `insitu serve --teacher`."""
    try:
        check_command(words)
    except click.BadOptionUsage:
        check_command([*words, "…"])


def test_printed_commands_exist_with_their_options() -> None:
    printed = list(printed_commands())
    assert len(printed) > 100
    wrong: list[str] = []
    for where, words in printed:
        try:
            mentioned(words[:1] if words[1:2] == ["…"] else words)
        except click.UsageError as error:
            wrong.append(f"{where} - {error.format_message()}")
    assert not wrong, "\n".join(wrong)
