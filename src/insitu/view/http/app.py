"""The FastAPI application: the routes and the pages, behind the door."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from insitu.errors import NotFound
from insitu.view.answers.resampling import BesideAgent
from insitu.view.catalogue import Catalogue
from insitu.view.http.door import Door, own_hosts
from insitu.view.http.events import Streams
from insitu.view.http.responses import install
from insitu.view.http.routes import view_routes
from insitu.web_pages import PAGES, page


def build_app(
    catalogue: Catalogue,
    port: int,
    *,
    streams: Streams | None = None,
    pages: Path = PAGES,
    config_file: Path | None = None,
) -> FastAPI:
    """Build the application for a server on this port; it closes the catalogue at its end.

    With `config_file`, groups are scored again by its reward and forks are continued by its backend.
    """
    beside = BesideAgent.of(config_file)
    streams = streams or Streams()

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None]:
        yield
        streams.stopping = True
        await run_in_threadpool(catalogue.close)

    app = FastAPI(
        title="insitu view",
        lifespan=lifespan,
        # Nothing but the routes and the pages: interactive documents load scripts from elsewhere.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.streams = streams
    install(app)
    app.include_router(view_routes(catalogue, streams, beside))

    @app.api_route("/{path:path}", methods=["GET", "HEAD"])
    def pages_of(path: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        if path.startswith("view/"):
            raise NotFound(f"no route is called /{path}", hint="GET /view/v1/runs")
        return page(path, pages)

    app.add_middleware(Door, hosts=own_hosts(port), token=beside.rescoring.token)
    return app
