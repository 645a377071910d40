"""Routes for leases: a version is served for evaluation as long as somebody holds it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from insitu.backend.api.requests import bounded_route, new_router
from insitu.backend.api.responses import shown
from insitu.backend.api.routes_runs import RunName
from insitu.backend.api.security import Sender
from insitu.backend.api.settings import Services
from insitu.types import NAME_PATTERN
from insitu.wire.answers import LeaseInfo
from insitu.wire.bodies import LeaseBody

LeaseId = Annotated[str, Path(pattern=NAME_PATTERN.pattern)]


def lease_routes(services: Services) -> APIRouter:
    """Build the router. The supervisor sees a lease in the ledger and loads its version."""
    ledger = services.ledger
    limits = services.limits
    router = new_router("leases", route_class=bounded_route(limits.max_body_bytes, limits))

    @router.put("/runs/{name}/leases/{lease_id}")
    def take_lease(name: RunName, lease_id: LeaseId, body: LeaseBody, sender: Sender) -> LeaseInfo:
        """Take a lease of a kept step, or renew it; a lease that has ended is a conflict with its reason."""
        return shown(sender, LeaseInfo.of(ledger.take_lease(name, lease_id, body.step, body.seconds)))

    @router.get("/runs/{name}/leases/{lease_id}")
    def get_lease(name: RunName, lease_id: LeaseId, sender: Sender) -> LeaseInfo:
        """One lease."""
        return shown(sender, LeaseInfo.of(ledger.get_lease(name, lease_id)))

    @router.delete("/runs/{name}/leases/{lease_id}")
    def release_lease(name: RunName, lease_id: LeaseId, sender: Sender) -> LeaseInfo:
        """End a lease. Repeating it is harmless."""
        return shown(sender, LeaseInfo.of(ledger.release_lease(name, lease_id)))

    return router
