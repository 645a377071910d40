"""The option `--url` of commands that talk to a running backend, and the talk itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from insitu.client import InsituClient

Result = TypeVar("Result")
DEFAULT_URL = "http://127.0.0.1:7623"

# Commands with --url, as hints write them.
_TALKING = re.compile(
    r"\binsitu (runs list|runs (show|close|release) [^\s`;,]+|"
    r"promote [^\s`;,]+( --newest)?|rollback [^\s`;,]+|"
    r"export [^\s`;,]+ [^\s`;,]+)"
)

url_option = click.option(
    "--url",
    default=DEFAULT_URL,
    show_default=True,
    help="The API of `insitu serve`. The key is read from INSITU_API_KEY.",
)


def ask(url: str, question: Callable[[InsituClient], Coroutine[Any, Any, Result]]) -> Result:
    """Connect to a backend and return what the question has learnt from it."""
    import asyncio

    from insitu.client import InsituClient
    from insitu.errors import InsituError, Unauthorized, Unavailable
    from insitu.system.keys import key_of
    from insitu.wire.transport import BROKEN, text_of

    if not url.startswith(("http://", "https://")):
        raise click.BadParameter(f"{url!r} has no scheme: write http://{url}", param_hint="--url")

    async def answer() -> Result:
        async with InsituClient(url, key_of()) as client:
            return await question(client)

    try:
        return asyncio.run(answer())
    except Unauthorized as error:
        raise Unauthorized(
            f"the backend at {url} rejects the key: {error.message}",
            hint="export INSITU_API_KEY=<the key that the backend was started with, or one of `insitu keys`>",
        ) from error
    except Unavailable as error:
        if not isinstance(error.__cause__, BROKEN):
            raise
        raise Unavailable(
            f"no insitu backend answers at {url}: {text_of(error.__cause__)}",
            hint="start one with `insitu serve`, or name its API with --url",
        ) from error
    except InsituError as error:
        error.hint = reaching(error.hint, url)
        raise


def elsewhere(url: str) -> str:
    """Return the option that a further command needs to reach the same backend."""
    import shlex

    return "" if url == DEFAULT_URL else f" --url {shlex.quote(url)}"


def reaching(hint: str, url: str) -> str:
    """Return a hint whose commands reach the backend that gave it."""
    return _TALKING.sub(lambda found: found[0] + elsewhere(url), hint)
