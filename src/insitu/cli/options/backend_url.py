"""The option `--url` of commands that talk to a running backend, and the talk itself."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from insitu.client import InsituClient

Result = TypeVar("Result")
DEFAULT_URL = "http://127.0.0.1:7623"

url_option = click.option(
    "--url",
    default=DEFAULT_URL,
    show_default=True,
    help="The API of `insitu serve`. The key is read from INSITU_API_KEY.",
)


def ask(url: str, question: Callable[[InsituClient], Coroutine[Any, Any, Result]]) -> Result:
    """Connect to a backend and return what the question has learnt from it."""
    import asyncio
    import os

    from insitu.client import InsituClient
    from insitu.system.keys import DEFAULT_KEY

    async def answer() -> Result:
        async with InsituClient(url, os.environ.get("INSITU_API_KEY") or DEFAULT_KEY) as client:
            return await question(client)

    return asyncio.run(answer())
