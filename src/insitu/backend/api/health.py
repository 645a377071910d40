"""Health of this process, and the supervisor's last report on the rest."""

from __future__ import annotations

import time
from pathlib import Path

import orjson
from fastapi import APIRouter, Request, Response

from insitu.backend.api.settings import Services
from insitu.errors import InsituError
from insitu.json_values import JsonObject, as_object
from insitu.wire.answers import Health

SERVICE = "insitu"
_MAX_STATUS_BYTES = 256 * 2**10


def health_routes(services: Services, version: str) -> APIRouter:
    """Build the router for the one route that needs no key."""
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
            status=status,
            version=version,
            ledger=ledger,
            supervisor=view,
            supervisor_age_seconds=age,
        )

    return router


def gateway_url(request: Request, status: JsonObject | None) -> str | None:
    """Return the gateway's URL: the caller's scheme and host name, with the port the supervisor reports."""
    port, name = (status or {}).get("gateway_port"), request.url.hostname
    if not isinstance(port, int) or not name:
        return None
    return f"{request.url.scheme}://{f'[{name}]' if ':' in name else name}:{port}"


def read_status(path: Path) -> tuple[JsonObject | None, float | None]:
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
