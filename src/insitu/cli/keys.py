"""`insitu keys`: keys for others, each with its scopes."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from insitu.access.key_limits import MOST, MOST_REQUESTS, KeyLimits
from insitu.access.scopes import Scope
from insitu.cli.options.durations import seconds_of
from insitu.cli.options.state_dir import state_dir_of, state_dir_option

_requests = click.IntRange(1, MOST_REQUESTS)
_amount = click.IntRange(1, MOST)


@click.group()
def keys() -> None:
    """Create, list and revoke keys of a backend.

    A running `insitu serve` with the same --state-dir sees every change at once. The key in INSITU_API_KEY
    is not among them: it has every scope and does not expire.
    """


@keys.command()
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    required=True,
    type=click.Choice([scope.value for scope in Scope]),
    help="infer: model calls. submit: runs, groups, steps. admin: everything. May be repeated.",
)
@click.option("--expires", metavar="30d", help="Lifetime in hours (h), days (d) or weeks (w). Default: none.")
@click.option(
    "--max-requests-per-minute", type=_requests, metavar="N", help="Requests within any 60 seconds."
)
@click.option(
    "--max-concurrent", type=_amount, metavar="N", help="Requests under way; a stream is, until it ends."
)
@click.option(
    "--max-tokens-per-day",
    type=_amount,
    metavar="N",
    help="Prompt and output tokens of model calls, per UTC day.",
)
@click.option("--max-bytes-per-day", type=_amount, metavar="N", help="Bytes of request bodies, per UTC day.")
@click.option("--project", metavar="NAME", help="Only the runs and calls of this project. Default: all.")
@state_dir_option
def create(
    name: str,
    scopes: tuple[str, ...],
    expires: str | None,
    max_requests_per_minute: int | None,
    max_concurrent: int | None,
    max_tokens_per_day: int | None,
    max_bytes_per_day: int | None,
    project: str | None,
    state_dir: Path | None,
) -> None:
    """Create a key and print it, once: only its hash is stored."""
    from insitu.access.key_changes import create_key

    lifetime = None if expires is None else seconds_of(expires, "--expires")
    directory = state_dir_of(state_dir)
    limits = KeyLimits(max_requests_per_minute, max_concurrent, max_tokens_per_day, max_bytes_per_day)
    granted = [Scope(scope) for scope in scopes]
    secret, stored = create_key(directory, name, granted, lifetime, limits, project=project)
    click.echo(secret)
    # Not on standard output, so that KEY="$(insitu keys create …)" takes the key alone.
    until = "until it is revoked" if stored.expires_at is None else f"until {_time(stored.expires_at)}"
    of = f" of project {project}" if project is not None else ""
    scoped = f"scopes {', '.join(stored.scopes)}{of}"
    click.echo(f"{name}: {scoped}, valid {until}. It is not shown again.", err=True)
    if str(limits):
        click.echo(f"Its limits: {limits}.", err=True)
    click.echo(f"It belongs to the backend with --state-dir {directory}.", err=True)


@keys.command(name="list")
@state_dir_option
def list_keys(state_dir: Path | None) -> None:
    """List the keys; those that ended are listed for 30 days."""
    import time

    from insitu.access.key_file import KEYS_FILE, read_keys

    path = state_dir_of(state_dir) / KEYS_FILE
    now = time.time()
    stored = read_keys(path)
    in_projects = any(key.project is not None for key in stored)
    rows = [
        (
            key.name,
            ",".join(key.scopes),
            key.state(now),
            _time(key.created_at),
            "never" if key.expires_at is None else _time(key.expires_at),
            *([key.project or "all"] if in_projects else []),
            str(key.limits) or "none",
        )
        for key in stored
    ]
    if not rows:
        click.echo(f"no keys in {path}; the key in INSITU_API_KEY is the only one", err=True)
        return
    shown = ["PROJECT"] if in_projects else []
    table = [("NAME", "SCOPES", "STATE", "CREATED", "EXPIRES", *shown, "LIMITS"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


@keys.command()
@click.argument("name")
@state_dir_option
def revoke(name: str, state_dir: Path | None) -> None:
    """Revoke a key for good. Requests that are under way finish."""
    from insitu.access.key_changes import revoke_key

    stored = revoke_key(state_dir_of(state_dir), name)
    assert stored.revoked_at is not None, "it was just revoked"
    click.echo(f"{name} was revoked at {_time(stored.revoked_at)}; a running backend rejects it from now on")


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
