"""`insitu backup` and `insitu restore`: the state of a backend, to another directory and back."""

from __future__ import annotations

from pathlib import Path

import click

from insitu.cli.options.state_dir import state_dir_of, state_dir_option

_MIB = 1 << 20


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@state_dir_option
def backup(directory: Path, state_dir: Path | None) -> None:
    """Copy a backend's state to DIRECTORY, also while `insitu serve` runs.

    DIRECTORY is new or empty. It gets the databases, the kept checkpoints, uploaded adapters, the hashes of
    the keys and the audit log; not the base model, the logs, or weights that are merged again at a start.
    Every step that was committed before the command began is in it. A backup without manifest.json was
    interrupted; delete it.
    """
    from insitu.backend.backup.backup import backup_state

    made = backup_state(state_dir_of(state_dir), directory.absolute())
    for part in made.missing:
        click.echo(f"warning: not in the backup: {part.path}: {part.reason}", err=True)
    click.echo(f"backed up {len(made.files)} files, {made.num_bytes / _MIB:.1f} MiB, to {directory}")


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@state_dir_option
def restore(directory: Path, state_dir: Path | None) -> None:
    """Restore a backend's state from the backup in DIRECTORY.

    The state directory must be empty, and no `insitu serve` may use it. Every file is compared with the
    backup's manifest before anything is written; afterwards the ledger is opened, and each run's newest
    checkpoint is checked. Keys that were revoked after the backup are valid again: revoke them again.
    """
    import shlex

    from insitu.backend.backup.restore import restore_state

    target = state_dir_of(state_dir)
    restored = restore_state(directory.absolute(), target)
    for part in restored.missing:
        click.echo(f"warning: the backup was made without {part.path}: {part.reason}", err=True)
    size = f"{len(restored.files)} files, {restored.num_bytes / _MIB:.1f} MiB"
    click.echo(
        f"restored {size}, to {target}; start it: insitu serve --state-dir {shlex.quote(str(target))} …"
    )
