"""`python -m insitu.backend.http`: the API as a process. Secrets come from the environment, never argv."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from insitu.backend.api.settings import ApiSettings, Limits, Services
from insitu.backend.http.app import build_api
from insitu.backend.http.connection import connection_class
from insitu.backend.http.forwarded import Forwarded
from insitu.database.url import VARIABLE, check_url
from insitu.errors import InsituError
from insitu.system.connections import collect_new_objects_only, reuse_receive_buffers
from insitu.system.drain import DRAIN_SECONDS
from insitu.system.keys import check_key, hash_key
from insitu.system.logs import log_to
from insitu.system.open_files import allow_open_files
from insitu.system.processes import bind
from insitu.system.tls import TlsFiles, add_listener_options, check_listener, scheme_of, tls_files


class ApiServer(uvicorn.Server):
    """Ends event streams as soon as it is told to stop; otherwise they would block the shutdown."""

    def __init__(self, config: uvicorn.Config, services: Services) -> None:
        super().__init__(config)
        self._services = services

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down on SIGTERM or SIGINT; a second SIGINT does not wait. The process exits with code 0."""
        del frame
        self._services.stopping = True
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m insitu.backend.http", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=7623, help="0 takes a free one and prints it")
    parser.add_argument("--state-dir", type=Path, required=True)
    add_listener_options(parser)
    parser.add_argument("--keep-calls-seconds", type=float, help="older calls may be deleted")
    parser.add_argument("--teacher", action="append", default=[], help="the name of a teacher")
    parser.add_argument("--publication", default="adapter", help="how the supervisor publishes")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    options = parse(argv)
    log_to(None)  # standard error; the supervisor writes it to logs/api.log
    allow_open_files()
    reuse_receive_buffers()
    try:
        return serve(options)
    except InsituError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def serve(options: argparse.Namespace) -> int:
    """Serve the API; bind first, so that a taken port is reported before anything is opened."""
    # Removed from the environment: nothing started from here needs it.
    key = os.environ.pop("INSITU_API_KEY", "")
    database_url = os.environ.pop(VARIABLE, "")
    check_key(key, options.host)
    tls = tls_files(options.tls_certificate, options.tls_key)
    check_listener(options.host, tls, behind_proxy=options.behind_proxy)
    options.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    sock = bind(options.host, options.port)
    port = sock.getsockname()[1]
    settings = ApiSettings(
        state_dir=options.state_dir,
        key_sha256=hash_key(key),
        host=options.host,
        port=port,
        allowed_hosts=tuple(name.lower() for name in options.allowed_host),
        teachers=tuple(options.teacher),
        publication=options.publication,
        limits=Limits(max_call_age_seconds=options.keep_calls_seconds),
        database_url=check_url(database_url) if database_url else None,
    )
    with sock:
        app = build_api(settings)
        config = server_config(app, settings.limits, tls, behind_proxy=options.behind_proxy)
        logging.getLogger(__name__).info("api listens on %s://%s:%d", scheme_of(tls), options.host, port)
        collect_new_objects_only()
        ApiServer(config, app.state.services).run(sockets=[sock])
    return 0


def server_config(
    app: FastAPI, limits: Limits, tls: TlsFiles | None, *, behind_proxy: bool
) -> uvicorn.Config:
    """Return how uvicorn serves the API, with TLS if there are files for it."""
    return uvicorn.Config(
        Forwarded(app, behind_proxy=behind_proxy),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(DRAIN_SECONDS),
        # h11 limits the size of headers.
        http=connection_class(limits, app.state.strangers),
        h11_max_incomplete_event_size=limits.max_head_bytes,
        ws="none",
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else tls.key,
        proxy_headers=False,
    )
