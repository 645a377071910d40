"""The option `--url`, the same for every command that asks a backend."""

from __future__ import annotations

import click

url_option = click.option(
    "--url",
    default="http://127.0.0.1:7623",
    show_default=True,
    help="The API of `insitu serve`. The key is read from INSITU_API_KEY.",
)
