"""`insitu replicas`: another number of engines, while the backend runs."""

from __future__ import annotations

from pathlib import Path

import click

from insitu.backend.fleet.replica_request import MAX_REPLICAS, ask
from insitu.cli.options.state_dir import state_dir_of, state_dir_option


@click.command()
@click.argument("number", type=click.IntRange(1, MAX_REPLICAS), metavar="NUMBER")
@click.option(
    "--deadline-seconds",
    type=click.FloatRange(min=1),
    default=1800.0,
    show_default=True,
    help="Longest wait until they are there.",
)
@state_dir_option
def replicas(number: int, deadline_seconds: float, state_dir: Path | None) -> None:
    """Have a running `insitu serve` with this --state-dir use NUMBER engines; wait until it does.

    Engines that are added take a GPU (or a processor of a cluster of several nodes) each and serve every
    version before they take calls. One that is removed takes no new calls, finishes its own, and returns its
    place. Calls and training go on. The next start has as many engines as its --replicas says.
    """
    done = ask(
        state_dir_of(state_dir), number, deadline_seconds, lambda doing: click.echo(f"{doing} …", err=True)
    )
    click.echo(done)
