"""The FastAPI application: its routes behind the `Door` middleware."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.types import Lifespan

from insitu.access.meters import KeyMeters
from insitu.access.sessions import Sessions
from insitu.backend.adapters.download import download_routes
from insitu.backend.adapters.routes import adapter_routes
from insitu.backend.api import problems
from insitu.backend.api.health import health_routes
from insitu.backend.api.requests import PREFIX
from insitu.backend.api.routes_groups import group_routes, upload_schemas
from insitu.backend.api.routes_jobs import job_routes
from insitu.backend.api.routes_runs import run_routes
from insitu.backend.api.routes_versions import lease_routes, promotion_routes
from insitu.backend.api.security import Door, strangers
from insitu.backend.api.settings import ApiSettings, Records, Services
from insitu.backend.art.routes import art_routes
from insitu.backend.http.metrics import CountedRequests, RequestCounts, metrics_routes
from insitu.backend.ledger import Ledger, ledger_url
from insitu.backend.pages.files import page_routes
from insitu.backend.pages.fleet import fleet_routes
from insitu.backend.pages.login import login_routes
from insitu.records.store import RecordStore, records_url

Documented: TypeAlias = dict[str, Any]
"""OpenAPI, as FastAPI takes and makes it."""


def build_api(
    settings: ApiSettings, *, ledger: Ledger | None = None, records: Records | None = None
) -> FastAPI:
    """Build the API over a state directory. The caller closes a ledger or record store it passes in."""
    close: list[Callable[[], None]] = []
    if ledger is None:
        ledger = Ledger(ledger_url(settings.state_dir, settings.database_url))
        close.append(ledger.close)
    if records is None:
        url = records_url(settings.state_dir, settings.database_url)
        store = RecordStore(url, keep_seconds=settings.limits.max_call_age_seconds)
        close.append(store.close)
        records = store
    services = Services(settings, ledger, records)
    meters = KeyMeters(settings.use_file)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None]:
        saving = asyncio.create_task(meters.keep_saved())
        yield
        services.stopping = True
        saving.cancel()
        await meters.save()
        for action in close:
            await run_in_threadpool(action)

    app = _bare_app(lifespan)
    app.state.services = services
    problems.install(app)
    sessions = Sessions()
    app.state.strangers = strangers(settings, sessions)
    counts = RequestCounts(app.state.strangers)
    routers = [health_routes(services, app.version), metrics_routes(services, app.version, counts)]
    routers += [page_routes(), login_routes(services, sessions), fleet_routes(services)]
    adapters = (adapter_routes, download_routes)
    versions = (lease_routes, promotion_routes)
    for routes in (run_routes, *adapters, group_routes, job_routes, *versions, art_routes):
        routers.append(routes(services))
    for router in routers:
        # `include_router` would build every route a second time.
        app.router.routes.extend(router.routes)
    _document_uploads(app)
    # Added after the routes, hence around them: nothing behind it is reached without a key.
    app.add_middleware(Door, settings=settings, routes=app.routes, meters=meters, sessions=sessions)
    app.add_middleware(CountedRequests, counts=counts)  # what the door rejects counts, too
    return app


def _bare_app(lifespan: Lifespan[FastAPI]) -> FastAPI:
    try:
        release = version("insitu")
    except PackageNotFoundError:
        release = "0+unknown"
    return FastAPI(
        title="insitu",
        version=release,
        lifespan=lifespan,
        openapi_url=f"{PREFIX}/openapi.json",
        # The interactive pages would load scripts from a third-party host.
        docs_url=None,
        redoc_url=None,
        # One spelling per route: a redirect would answer for paths outside the route table.
        redirect_slashes=False,
    )


def _document_uploads(app: FastAPI) -> None:
    generate = app.openapi

    def openapi() -> Documented:
        document = generate()
        document.setdefault("components", {}).setdefault("schemas", {}).update(upload_schemas())
        return document

    app.openapi = openapi
