"""The option `--state-dir`, the same for every command that works on a backend's directory."""

from __future__ import annotations

from pathlib import Path

import click

state_dir_option = click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    envvar="INSITU_STATE_DIR",
    help="Directory of runs, ledger and logs. Default: ~/.local/state/insitu.",
)


def state_dir_of(given: Path | None) -> Path:
    """Return the directory that the option names, or the default one."""
    path = (given or Path.home() / ".local" / "state" / "insitu").absolute()
    if path.exists() and not path.is_dir():
        raise click.BadParameter(f"{path} is a file, not a directory", param_hint="--state-dir")
    return path
