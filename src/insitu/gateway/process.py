"""The gateway process: ``python -m insitu.gateway``. Secrets come from the environment, not arguments."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from aiohttp import web

from insitu.access import engine_door
from insitu.database.url import VARIABLE, check_url
from insitu.errors import InsituError, Unavailable
from insitu.gateway.app import build_app
from insitu.gateway.connection import Site
from insitu.gateway.shared.settings import Limits, Settings
from insitu.system.connections import collect_new_objects_only, reuse_receive_buffers
from insitu.system.keys import DEFAULT_KEY, is_loopback
from insitu.system.logs import log_to
from insitu.system.open_files import allow_open_files
from insitu.system.tls import add_listener_options, scheme_of, tls_files


def settings_from(arguments: list[str]) -> Settings:
    """Read the settings from a command line and the environment."""
    parser = argparse.ArgumentParser(prog="python -m insitu.gateway", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--records", help=f"SQLAlchemy URL of the record store; default: {VARIABLE}")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--managed", action="store_true", help="a supervisor sends the routing table")
    source.add_argument("--upstream", action="append", default=[], help="an engine's URL; repeatable")
    parser.add_argument("--tokenizer", type=Path, help="the directory of the served model's tokenizer.json")
    add_listener_options(parser)
    parser.add_argument("--keys", type=Path, help="the file of the keys that `insitu keys` creates")
    parser.add_argument("--number", type=int, default=0, help="which of several gateways this is")
    remembered = Limits().max_remembered_tokens
    parser.add_argument("--remembered-tokens", type=int, default=remembered, help="ids kept for next turns")
    given = parser.parse_args(arguments)
    database_url = os.environ.get(VARIABLE, "")
    if not given.records and not database_url:
        parser.error(f"--records or {VARIABLE} is needed")
    fallback = DEFAULT_KEY if is_loopback(given.host) else ""
    return Settings(
        records_url=given.records or check_url(database_url),
        api_key=os.environ.get("INSITU_API_KEY") or fallback,
        admin_key=os.environ.get("INSITU_ADMIN_KEY", ""),
        engine_key=os.environ.get(engine_door.VARIABLE, "") if given.managed else "",
        keys_file=given.keys,
        number=given.number,
        host=given.host,
        port=given.port,
        upstreams=tuple(given.upstream),
        tokenizer=given.tokenizer,
        allowed_hosts=tuple(name.lower() for name in given.allowed_host),
        tls=tls_files(given.tls_certificate, given.tls_key),
        behind_proxy=given.behind_proxy,
        limits=Limits(max_remembered_tokens=given.remembered_tokens),
    )


async def serve(settings: Settings) -> None:
    """Run until SIGTERM or Ctrl-C, then finish the calls under way and flush the records."""
    runner = web.AppRunner(
        build_app(settings),
        handler_cancellation=True,  # a client that disconnects ends its generation
        access_log=None,
        # aiohttp waits twice: for handlers to end, and again before it cancels them.
        shutdown_timeout=settings.limits.drain_seconds / 2,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    await runner.setup()
    try:
        await listen(runner, settings)
        collect_new_objects_only()
        scheme = scheme_of(settings.tls)
        logging.getLogger(__name__).info("listening on %s://%s:%d", scheme, settings.host, settings.port)
        await stop.wait()
    finally:
        await runner.cleanup()


async def listen(runner: web.AppRunner, settings: Settings) -> None:
    """Open the address of a gateway, with TLS if there are files for it."""
    tls = None if settings.tls is None else settings.tls.context()
    try:
        await Site(runner, settings.host, settings.port, settings.limits, tls).start()
    except OSError as error:
        raise Unavailable(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}",
            hint="free the port or choose another with --port",
        ) from error


def main(arguments: list[str] | None = None) -> None:
    """Run the gateway; an InsituError exits with its message and status 1."""
    log_to(None)  # standard error; under a supervisor that is logs/gateway.log
    allow_open_files()
    reuse_receive_buffers()
    try:
        asyncio.run(serve(settings_from(sys.argv[1:] if arguments is None else arguments)))
    except InsituError as error:
        raise SystemExit(f"error: {error}") from error
