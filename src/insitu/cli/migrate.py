"""`insitu migrate`: convert a configuration of the NeMo Agent Toolkit's harness to insitu."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from insitu.compat.nemo.migration import Migration
    from insitu.compat.nemo.note import Note

BY_HAND = 3


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, allow_dash=True),
    help="File to write, or `-` for standard output. Default: CONFIG with the suffix .insitu.yml.",
)
@click.option("--force", is_flag=True, help="Overwrite the output file if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def migrate(config: Path, output: Path | None, force: bool, as_json: bool) -> None:
    """Convert a configuration of the NeMo Agent Toolkit's finetuning harness to insitu.

    The new file keeps the comments and the order of the old one. Settings without effect here are commented
    out, with the reason. A report lists settings that take effect for the first time, settings whose meaning
    changed, and what remains to be done by hand. Exit codes: 0 the new file loads, 3 something remains to be
    done by hand, 1 the file cannot be read or written, 2 wrong usage.
    """
    import os
    import sys

    from insitu.compat.nemo.migration import migrate as run
    from insitu.config.load import read_text
    from insitu.harness.screen.safe_output import SafeOutput

    target = output or _beside(config)
    result = run(read_text(config), str(config), os.environ)
    to_stdout = str(target) == "-"
    if to_stdout:
        click.echo(result.text, nl=False)
    else:
        _write(target, result.text, force, windows=b"\r\n" in config.read_bytes())
    shown = None if to_stdout else target
    report = _json(config, shown, result) if as_json else "\n".join(_lines(config, shown, result))
    SafeOutput(sys.stderr if to_stdout else sys.stdout, quiet=True).write(report + "\n")
    sys.exit(BY_HAND if result.by_hand else 0)


def _beside(config: Path) -> Path:
    """Return the path of the new file; a file that was already migrated keeps its path."""
    return config if config.name.endswith(".insitu.yml") else config.with_suffix(".insitu.yml")


def _write(target: Path, text: str, force: bool, windows: bool) -> None:
    """Write the file, overwriting different content only if forced. Line endings stay as they were."""
    from insitu.errors import Conflict, InvalidRequest

    content = text.replace("\n", "\r\n").encode() if windows else text.encode()
    try:
        if target.exists() and not force and target.read_bytes() != content:
            raise Conflict(
                f"{target}: the file exists and differs",
                hint="choose another file with -o FILE, or overwrite it with --force",
            )
        target.write_bytes(content)
    except OSError as error:
        raise InvalidRequest(f"{target}: cannot be written: {error.strerror or error}") from error


def _titles(result: Migration) -> list[tuple[str, str, list[Note]]]:
    return [
        ("by_hand", "To do by hand", result.by_hand),
        ("takes_effect", "Takes effect here, had no effect there", result.takes_effect),
        ("left_out", "Left out", result.left_out),
        ("rewritten", "Rewritten", result.rewritten),
        ("changed_meaning", "Changed meaning", result.changed_meaning),
        ("unset_variables", "Variables not set now", result.unset_variables),
    ]


def _json(config: Path, target: Path | None, result: Migration) -> str:
    import json

    notes = {name: [note.to_dict() for note in notes] for name, _, notes in _titles(result)}
    head = {"config": str(config), "output": None if target is None else str(target)}
    return json.dumps({**head, "loads": not result.by_hand, **notes}, indent=2, ensure_ascii=False)


def _lines(config: Path, target: Path | None, result: Migration) -> list[str]:
    import shlex

    from insitu.harness.screen.safe_output import visible

    lines = [f"{config} → {target or 'standard output'}"]
    for _, title, notes in _titles(result):
        if notes:
            lines += ["", title]
            lines += [visible(line) for note in notes for line in _note(note)]
    name = shlex.quote(str(target or "FILE"))
    lines += ["", f"next: insitu finetune --config_file={name} --dry-run"]
    if result.by_hand:
        lines[-1] = (
            f"next: do the steps listed under `To do by hand` in {name}, then check it: insitu migrate {name}"
        )
    return lines


def _note(note: Note) -> list[str]:
    where = f"line {note.line}" if note.line else ""
    value = f" = {note.value}" if note.value is not None else ""
    lines = [f"  {where:<9} {note.path}{value}: {note.text}"]
    return lines + [f"{'':14}{line}" for line in (note.yaml or "").splitlines()]
