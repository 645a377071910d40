"""`insitu runs`: the runs of a backend."""

from __future__ import annotations

import click

from insitu.cli.options.backend_url import ask, url_option


@click.group()
def runs() -> None:
    """List, show and close the runs of a backend."""


@runs.command(name="list")
@url_option
@click.option("--json", "as_json", is_flag=True, help="Print the runs as the API describes them.")
def list_runs(url: str, as_json: bool) -> None:
    """List the runs, oldest first: name, state, steps trained, base model and project."""
    import json
    from dataclasses import asdict

    found = ask(url, lambda client: client.list_runs())
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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with all metrics.")
def show(name: str, url: str, as_json: bool) -> None:
    """Show one run: registration, adapter, lineage, checkpoints, errors, and main figures of its steps."""
    import json

    from insitu.harness.screen.safe_output import visible
    from insitu.trained.run_view import read_run

    view = ask(url, lambda client: read_run(client, name))
    if as_json:
        click.echo(json.dumps(view.to_dict()))
        return
    for line in view.lines():
        click.echo(visible(line))


@runs.command()
@click.argument("name")
@url_option
def close(name: str, url: str) -> None:
    """Close a run, so that another can be served in its place. Its checkpoints stay.

    The same registration, by `insitu finetune` with the run's own output_dir, opens it again.
    """
    closed = ask(url, lambda client: client.close_run(name))
    click.echo(f"{closed.name} is {closed.state} at step {closed.step}; its checkpoints are kept")
