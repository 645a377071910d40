"""The options of a command that listens: its certificate, or the proxy that has one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


class ListenerOptions(TypedDict):
    """The options by click's names."""

    tls_certificate: Path | None
    tls_key: Path | None
    behind_proxy: bool


def listener_options(command: Command) -> Command:
    """Add the options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS = (
    click.option(
        "--tls-certificate",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Speak HTTPS with this certificate: PEM, the server's own first, then its chain.",
    ),
    click.option(
        "--tls-key",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Key of the certificate: PEM, without passphrase, readable by its owner only.",
    ),
    click.option(
        "--behind-proxy",
        is_flag=True,
        help="A proxy in front of it terminates TLS: allow plain HTTP on an address beyond loopback.",
    ),
)
