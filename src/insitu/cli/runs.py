"""`insitu runs`: the runs of a backend."""

from __future__ import annotations

import click

from insitu.cli.options.backend_url import ask, elsewhere, url_option


@click.group()
def runs() -> None:
    """List, show, fork, release, close and delete the runs of a backend."""


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


@runs.command()
@click.argument("name")
@url_option
def release(name: str, url: str) -> None:
    """Say that nobody works with a run any more, so that it may go idle. A call or a step brings it back.

    `insitu finetune` does so at its end; this is for one that was killed.
    """
    released = ask(url, lambda client: client.release_run(name))
    click.echo(f"{released.name} is released at step {released.step}: it goes idle after its last step")


@runs.command()
@click.argument("name")
@url_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print the deleted run as the API describes it.")
def delete(name: str, url: str, yes: bool, as_json: bool) -> None:
    """Delete a run for good: its steps, checkpoints, groups and recorded calls. Its name is free again.

    Runs that start from it keep their own copy. It is refused while a job of the run is queued or runs.
    """
    import json
    from dataclasses import asdict

    from insitu.trained.deletion import delete_run

    found = ask(url, lambda client: client.get_run(name))
    if not yes:
        click.confirm(
            f"Delete {name} with its {found.step} steps and all checkpoints for good?", abort=True, err=True
        )
    gone = ask(url, lambda client: delete_run(client, found))
    if as_json:
        click.echo(json.dumps(asdict(gone)))
        return
    click.echo(f"{gone.name} is deleted: {gone.step} steps, {gone.num_calls} recorded calls")


@runs.command()
@click.argument("version", metavar="NAME@STEP")
@click.argument("new")
@url_option
@click.option(
    "--whole", is_flag=True, help="Take its optimizer and random state too: the same training goes on."
)
@click.option("--json", "as_json", is_flag=True, help="Print the new run as the API describes it.")
def fork(version: str, new: str, url: str, whole: bool, as_json: bool) -> None:
    """Register the run NEW, which starts from a kept step of another run."""
    import json
    from dataclasses import asdict

    from insitu.trained.fork import fork_run

    made = ask(url, lambda client: fork_run(client, version, new, whole=whole))
    if as_json:
        click.echo(json.dumps(asdict(made)))
        return
    click.echo(f"{made.name} is {made.state} and starts from {made.source}. See when it is ready:")
    click.echo(f"  insitu runs show {made.name}{elsewhere(url)}")
