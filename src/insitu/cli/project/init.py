"""`insitu init`: a new project that runs as it is."""

from __future__ import annotations

import click

from insitu.scaffold.framework import FRAMEWORKS


@click.command()
@click.argument("name")
@click.option(
    "--framework",
    type=click.Choice(list(FRAMEWORKS)),
    default="openai",
    show_default=True,
    help="Framework of the agent.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written and the next commands as JSON.")
def init(name: str, framework: str, as_json: bool) -> None:
    """Write a project into the new directory NAME: agent, reward, data, configuration and a test.

    It runs as it is; then replace its parts with your own. A directory that is not empty is left alone.
    """
    import json

    from insitu.scaffold.project import Project

    project = Project(name, framework)
    written, commands, missing = project.write(), project.commands(), project.chosen.missing()
    install = project.chosen.install_command if missing else None
    if as_json:
        found = {
            "directory": str(project.path),
            "framework": framework,
            "files": written,
            "missing": missing,
            "install": install,
            "commands": commands,
        }
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    serve, *others = commands
    click.echo(f"{name}: a project for {project.chosen.label}")
    for file in written:
        click.echo(f"  {name}/{file}")
    if install:
        click.echo(f"\nNot installed: {', '.join(missing)}. Install what the agent needs:\n  {install}")
    click.echo(f"\nStart a backend; it says `ready` when it is:\n  cd {name}\n  {serve}")
    click.echo(f"\nThen, in a second terminal:\n  cd {name}")
    for command in others:
        click.echo(f"  {command}")
    click.echo(f"\nWhat to change next is in {name}/README.md.")
