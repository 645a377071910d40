"""`insitu runs`: the runs of a backend."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import click

from insitu.cli.options.url import url_option

if TYPE_CHECKING:
    from insitu.client import InsituClient
    from insitu.wire.answers import RunInfo

Result = TypeVar("Result")


@click.group()
def runs() -> None:
    """List and close the runs of a backend."""


@runs.command(name="list")
@url_option
@click.option("--json", "as_json", is_flag=True, help="Print the runs as the API describes them.")
def list_runs(url: str, as_json: bool) -> None:
    """List the runs, oldest first: name, state, steps trained, base model and project."""
    import json
    from dataclasses import asdict

    async def ask(client: InsituClient) -> list[RunInfo]:
        return await client.list_runs()

    found = _ask(url, ask)
    if as_json:
        click.echo(json.dumps([asdict(run) for run in found]))
        return
    if not found:
        click.echo("no runs", err=True)
    for run in found:
        error = f"   {run.error}" if run.error else ""
        click.echo(f"{run.name}   {run.state}, step {run.step}, {run.base_model}, {run.project}{error}")


@runs.command()
@click.argument("name")
@url_option
def close(name: str, url: str) -> None:
    """Close a run, so that another can be served in its place. Its checkpoints stay.

    The same registration, by `insitu finetune` with the run's own output_dir, opens it again.
    """

    async def ask(client: InsituClient) -> RunInfo:
        return await client.close_run(name)

    closed = _ask(url, ask)
    click.echo(f"{closed.name} is {closed.state} at step {closed.step}; its checkpoints are kept")


def _ask(url: str, ask: Callable[[InsituClient], Coroutine[Any, Any, Result]]) -> Result:
    import asyncio
    import os

    from insitu.client import InsituClient
    from insitu.system.keys import DEFAULT_KEY

    async def answer() -> Result:
        async with InsituClient(url, os.environ.get("INSITU_API_KEY") or DEFAULT_KEY) as client:
            return await ask(client)

    return asyncio.run(answer())
