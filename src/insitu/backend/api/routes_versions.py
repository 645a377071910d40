"""Routes for what is served besides the newest steps: leases for evaluation, and promotions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from insitu.backend.api.requests import bounded_route, new_router
from insitu.backend.api.responses import shown
from insitu.backend.api.routes_runs import RunName, StepNumber
from insitu.backend.api.security import Sender
from insitu.backend.api.settings import Services
from insitu.errors import CannotHonour
from insitu.types import NAME_PATTERN, policy_name
from insitu.wire.answers import LeaseInfo, PromotionInfo, PromotionList
from insitu.wire.bodies import LeaseBody

LeaseId = Annotated[str, Path(pattern=NAME_PATTERN.pattern)]
PromotionId = Annotated[int, Path(ge=1, lt=2**63)]


def lease_routes(services: Services) -> APIRouter:
    """Build the router of leases. The supervisor sees a lease in the ledger and loads its version."""
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


def promotion_routes(services: Services) -> APIRouter:
    """Build the router of promotions. The supervisor sees the last one in the ledger and serves it."""
    ledger = services.ledger
    limits = services.limits
    router = new_router("promotions", route_class=bounded_route(limits.max_body_bytes, limits))

    @router.get("/runs/{name}/promotions")
    def list_promotions(name: RunName, sender: Sender) -> PromotionList:
        """Every decision about the step that calls to the run's plain name get, oldest first."""
        return PromotionList([shown(sender, PromotionInfo.of(each)) for each in ledger.promotions(name)])

    @router.put("/runs/{name}/promoted/{step}")
    def promote(name: RunName, step: StepNumber, sender: Sender) -> PromotionInfo:
        """Give calls to the run's plain name a kept step from now on. Repeating it is harmless."""
        if services.settings.publication == "merged":
            ledger.get_run(name)
            version = policy_name(name, step)
            raise CannotHonour(
                f"{version} cannot be promoted: merged publication serves one version at a time, and "
                "rollouts need the newest",
                hint="start the backend with --publication adapter, or serve the step elsewhere: "
                f"insitu export {version} DIRECTORY",
            )
        return shown(sender, PromotionInfo.of(ledger.promote(name, step)))

    @router.delete("/runs/{name}/promoted")
    def follow_newest(name: RunName, sender: Sender) -> PromotionInfo:
        """Give calls to the run's plain name the newest step again. Repeating it is harmless."""
        return shown(sender, PromotionInfo.of(ledger.promote(name, None)))

    @router.post("/runs/{name}/promotions/{promotion_id}/rollback")
    def roll_back(name: RunName, promotion_id: PromotionId, sender: Sender) -> PromotionInfo:
        """Return to the decision before this one, which must be the last. Repeating it is harmless."""
        return shown(sender, PromotionInfo.of(ledger.roll_back(name, promotion_id)))

    return router
