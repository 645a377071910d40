"""Options that name a configuration and change it."""

from __future__ import annotations

from pathlib import Path

import click

override_option = click.option(
    "-o",
    "--override",
    nargs=2,
    multiple=True,
    metavar="PATH VALUE",
    help="Override one setting, for example -o finetuning.num_epochs 50. May be repeated.",
)
config_argument = click.argument("config", required=False, type=click.Path(path_type=Path))
config_option = click.option(
    "--config_file", "--config-file", type=click.Path(path_type=Path), help="The same as CONFIG."
)


def chosen_config(argument: Path | None, option: Path | None) -> Path:
    """Return the configuration of a command that takes it as an argument or as an option."""
    if argument is not None and option is not None:
        raise click.UsageError("give CONFIG or --config_file, not both")
    path = argument or option
    if path is None:
        raise click.UsageError("name your configuration, for example config.yml")
    return path
