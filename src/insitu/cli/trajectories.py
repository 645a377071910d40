"""`insitu trajectories`: look at the rollouts of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

import click

if TYPE_CHECKING:
    from rich.console import Console

    from insitu.harness.screen.run_reader import Found, RunReader

_DEFAULT_LIMIT = 50
_RUN = click.argument("run", type=click.Path(path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="As JSON, complete.")


@click.group()
def trajectories() -> None:
    """Look at the rollouts of a run.

    RUN is the finetuning.output_dir of a run, or its configuration file. A run may be looked at while it is
    under way.
    """


@trajectories.command(name="list")
@_RUN
@click.option("--epoch", type=int, help="Only this epoch, as in the names of the files: 0 is the first.")
@click.option("--validation", is_flag=True, help="Those of validations instead of epochs.")
@click.option("--ending", help="Only those that ended so: completed, length, timeout, …")
@click.option("--best", is_flag=True, help="The highest reward first.")
@click.option("--worst", is_flag=True, help="The lowest reward first.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    help=f"At most so many; 0: all. Default: {_DEFAULT_LIMIT}, JSON all.",
)
@_JSON
def list_rollouts(
    run: Path,
    epoch: int | None,
    validation: bool,
    ending: str | None,
    best: bool,
    worst: bool,
    limit: int | None,
    as_json: bool,
) -> None:
    """One row per rollout."""
    from insitu.harness.screen.run_reader import RunReader

    reader = RunReader.open(run)
    rows = list(reader.rollouts(_stores(reader, epoch, validation)))
    rows = [row for row in rows if ending is None or row.rollout.ending == _ending(ending)]
    if best or worst:
        rows = [row for row in rows if row.rollout.reward is not None]
        rows.sort(key=lambda row: row.rollout.reward or 0.0, reverse=best)
    if limit is None:
        limit = 0 if as_json else _DEFAULT_LIMIT
    shown = rows[:limit] if limit else rows
    if as_json:
        _print_json({"run_id": reader.run_id, "total": len(rows), "rollouts": [_row(each) for each in shown]})
    else:
        _print_table(shown, len(rows))


@trajectories.command()
@_RUN
@click.argument("rollout")
@click.option("--tokens", is_flag=True, help="Every sampled token on a line of its own.")
@_JSON
def show(run: Path, rollout: str, tokens: bool, as_json: bool) -> None:
    """One rollout: messages, tool calls, tokens, reward, ending.

    ROLLOUT is its id, or any part of it that no other has: e3.0.1 is generation 1 of the first example in
    epoch 3.
    """
    import asyncio

    from insitu.harness.screen.rollout_page import page
    from insitu.harness.screen.run_reader import RunReader
    from insitu.harness.screen.shown_rollout import load_rollout

    reader = RunReader.open(run)
    shown = asyncio.run(load_rollout(reader, reader.find(rollout)))
    if as_json:
        _print_json(shown.to_json())
        return
    console = _console()
    for line in page(shown, console, tokens=tokens):
        console.print(line, soft_wrap=True)


def _stores(reader: RunReader, epoch: int | None, validation: bool) -> list[str]:
    from insitu.errors import NotFound

    kind = "validation" if validation else "epoch"
    stores = [name for name in reader.stores() if name.startswith(f"{kind}-")]
    if epoch is None:
        return stores
    chosen = [name for name in stores if int(name.split("-")[1]) == epoch]
    if not chosen:
        raise NotFound(
            f"{reader.path} has no rollouts of {kind} {epoch}",
            hint=f"it has {', '.join(reader.stores()) or 'none yet'}",
        )
    return chosen


def _ending(text: str) -> str:
    from insitu.types import Ending

    if text not in set(Ending):
        raise click.BadParameter(f"{text!r} is none of {', '.join(Ending)}", param_hint="--ending")
    return text


def _row(found: Found) -> dict[str, object]:
    rollout, figures = found.rollout, found.rollout.figures
    return {
        "store": found.store,
        "rollout_id": rollout.rollout_id,
        "example_id": rollout.example_id,
        "generation": rollout.generation,
        "ending": str(rollout.ending),
        "reason": rollout.reason,
        "reward": rollout.reward,
        "step_rewards": rollout.call_rewards,
        "num_calls": figures.num_calls,
        "num_trained_calls": len(rollout.call_ids),
        "num_output_tokens": figures.num_output_tokens,
        "policy_steps": figures.policy_steps,
        "capture": None if figures.capture is None else figures.capture.to_dict(),
        "seconds": rollout.seconds,
        "started_at": rollout.started_at,
    }


def _print_table(rows: list[Found], total: int) -> None:
    from rich.table import Table
    from rich.text import Text

    from insitu.harness.screen.safe_output import visible

    console = _console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("file", "example", "gen", "ending", "reward", "calls", "tokens", "steps", "rollout"):
        numeric = name in ("gen", "reward", "calls", "tokens")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=name in ("file", "rollout"))
    for found in rows:
        rollout, figures = found.rollout, found.rollout.figures
        words = [
            found.store,
            rollout.example_id,
            str(rollout.generation),
            str(rollout.ending),
            "" if rollout.reward is None else f"{rollout.reward:.4g}",
            str(figures.num_calls),
            str(figures.num_output_tokens),
            ", ".join(map(str, figures.policy_steps)),
            rollout.rollout_id,
        ]
        style = "" if rollout.reward is not None else "red"
        table.add_row(*(Text(visible(word).replace("\n", " "), style=style) for word in words))
    console.print(table)
    if len(rows) < total:
        console.print(Text(f"{total - len(rows)} more: --limit 0 shows all", style="dim"))


def _console() -> Console:
    """Use a terminal's colours and width; elsewhere print plain lines at full length."""
    from rich.console import Console

    from insitu.harness.screen.safe_output import SafeOutput

    output = SafeOutput(quiet=True)
    width = None if output.isatty() else 1000
    return Console(file=cast(TextIO, output), width=width, markup=False, emoji=False, highlight=False)


def _print_json(value: object) -> None:
    from insitu.harness.screen.safe_output import SafeOutput

    output = SafeOutput(quiet=True)
    # ASCII only: otherwise control characters that JSON allows in text would reach the terminal.
    output.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
    output.flush()
