"""Serve the pages of a directory on loopback until Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from insitu.errors import NotFound
from insitu.system.processes import bind
from insitu.view.catalogue import Catalogue
from insitu.view.http.app import build_app
from insitu.view.http.events import Streams

_HOST = "127.0.0.1"
_DRAIN_SECONDS = 3


class ViewServer(uvicorn.Server):
    """Ends event streams as soon as it is told to stop; otherwise they would block the shutdown."""

    def __init__(self, config: uvicorn.Config, streams: Streams, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._streams = streams
        self._ready = ready

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down on SIGTERM or SIGINT; a second SIGINT does not wait."""
        del frame
        self._streams.stopping = True
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def startup(self, sockets: list[object] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Start to listen, then say so."""
        await super().startup(sockets)  # pyright: ignore[reportArgumentType]
        if self.started:
            self._ready()


def serve(
    root: Path,
    port: int,
    *,
    tokenizer: Path | None,
    ready: Callable[[str], None],
    config_file: Path | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; `ready` gets the address once it can be opened."""
    catalogue = Catalogue(root, tokenizer=tokenizer)
    found, problems = catalogue.runs()
    if not found:
        reason = f": {problems[0]}" if problems else ""
        raise NotFound(
            f"{root} is neither a run of `insitu finetune` nor a directory that holds some{reason}",
            hint="name the finetuning.output_dir of a run, or a directory above it",
        )
    streams = Streams()
    with bind(_HOST, port) as sock:
        address = f"http://{_HOST}:{sock.getsockname()[1]}/"
        config = uvicorn.Config(
            build_app(catalogue, sock.getsockname()[1], streams=streams, config_file=config_file),
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_DRAIN_SECONDS,
            ws="none",
            http="h11",
        )
        ViewServer(config, streams, lambda: ready(address)).run(sockets=[sock])
