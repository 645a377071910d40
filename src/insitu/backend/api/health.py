"""Health of this process, the supervisor's last report on the rest, and what speaks against sending work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import orjson
from fastapi import APIRouter, Request, Response

from insitu.access.projects import told_to_all
from insitu.backend.api.settings import Services
from insitu.errors import InsituError
from insitu.json_values import JsonObject, as_object
from insitu.wire.answers import Health, Readiness

SERVICE = "insitu"
_MAX_STATUS_BYTES = 256 * 2**10
_SILENT_SECONDS = 30.0
"""The supervisor reports twice a second; after so long it hangs, or its disk is full."""
_LEDGER_SECONDS = 5.0
"""Longest wait for the ledger's writer."""


def health_routes(services: Services, version: str) -> APIRouter:
    """Build the router for the routes that need no key."""
    router = APIRouter(tags=["health"])

    @router.get("/health")
    def health(request: Request, response: Response) -> Health:
        """200 when the ledger can be read, else 503; `supervisor` is its own view of engines and trainer."""
        try:
            services.ledger.ping()
            ledger = "ok"
        except InsituError as error:
            ledger = error.message
            response.status_code = 503
        view, age = read_status(services.settings.state_dir / "status.json")
        status = "ok" if ledger == "ok" else "failing"
        return Health(
            service=SERVICE,
            gateway_url=gateway_url(request, view),
            gateway_urls=gateway_urls(request, view),
            status=status,
            version=version,
            ledger=ledger,
            supervisor=view,
            supervisor_age_seconds=age,
        )

    @router.get("/ready", responses={503: {"model": Readiness}})
    def ready(response: Response) -> Readiness:
        """200 when the loaded model can be called and trained, else 503 with the causes."""
        causes = against(*read_status(services.settings.state_dir / "status.json"))
        try:
            services.ledger.check_writable(_LEDGER_SECONDS)
        except InsituError as error:
            causes.append(error.message)
        found = Readiness.because(causes)
        response.status_code = found.status
        return found

    return router


def against(view: JsonObject | None, age: float | None) -> list[str]:
    """Return what the supervisor's report says against sending calls and steps.

    A trainer that a failed or cancelled step has stopped is no cause: the next step starts it.
    """
    if view is None:
        return ["the supervisor has reported nothing yet"]
    if age is None:
        return [str(view.get("error"))]
    if age > _SILENT_SECONDS:
        return [f"the supervisor has reported nothing for {age:.0f} s"]
    if view.get("state") != "ready":
        return [f"the backend is {view.get('state')}"]
    return list(_missing(view))


def _missing(view: JsonObject) -> Iterator[str]:
    engines = (as_object(view.get("replicas")) or {}).values()
    gateway = as_object(view.get("gateway"))
    if view.get("model") is None:
        yield "no model is loaded: the first registration loads one"
    elif not any((as_object(engine) or {}).get("joined") is True for engine in engines):
        yield "no engine takes calls"
    if gateway is None:
        yield "the gateway does not answer"
    elif view.get("model") is not None and gateway.get("epoch") is None:
        yield "the gateway has no routing table"
    if view.get("waiting") is not None:
        yield f"training waits: {view['waiting']}"


def gateway_url(request: Request, status: JsonObject | None) -> str | None:
    """Return the URL of the gateway, or of the first one."""
    return next(iter(gateway_urls(request, status)), None)


def gateway_urls(request: Request, status: JsonObject | None) -> list[str]:
    """Return the gateways' URLs: the caller's scheme and host name, with ports as the supervisor reports."""
    status, name = status or {}, request.url.hostname
    first, count = status.get("gateway_port"), status.get("num_gateways", 1)
    if not isinstance(first, int) or not isinstance(count, int) or not name:
        return []
    root = f"{request.url.scheme}://{f'[{name}]' if ':' in name else name}"
    return [f"{root}:{port}" for port in range(first, first + count)]


def read_status(path: Path) -> tuple[JsonObject | None, float | None]:
    """Return the supervisor's report as anybody may read it, and its age; see `read_report`."""
    view, age = read_report(path)
    if view is None:
        return None, None
    if isinstance(view.get("waiting"), str):
        view["waiting"] = told_to_all(str(view["waiting"]))
    if (gateway := as_object(view.get("gateway"))) is not None:
        gateway.pop("in_flight", None)  # by version, which names runs
    ranks = view.get("trainer")
    for rank in ranks if isinstance(ranks, list) else []:
        (as_object(rank) or {}).pop("runs", None)  # by name
    return view, age


def read_report(path: Path) -> tuple[JsonObject | None, float | None]:
    """Return the supervisor's report and its age in seconds; an unusable file is reported as an error."""
    try:
        written = path.stat()
        if written.st_size > _MAX_STATUS_BYTES:
            return {"error": f"status.json is over {_MAX_STATUS_BYTES} bytes"}, None
        view = as_object(orjson.loads(path.read_bytes()))
    except FileNotFoundError:
        return None, None
    except (OSError, orjson.JSONDecodeError) as error:
        return {"error": f"status.json cannot be read: {type(error).__name__}"}, None
    if view is None:
        return {"error": "status.json is not an object"}, None
    return view, max(0.0, time.time() - written.st_mtime)
