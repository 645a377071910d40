"""Decide which step of a run calls to its plain name get, and wait until they do."""

from __future__ import annotations

import asyncio

from insitu.client import InsituClient
from insitu.errors import ChildFailed, Conflict
from insitu.types import RunState, policy_name
from insitu.wire.answers import PromotionInfo

_WAIT_SECONDS = 30.0
"""A step under way goes first, and may take longer: then the decision is recorded and not served yet."""
_POLL_SECONDS = 0.2


async def promote(client: InsituClient, run: str, step: int | None) -> PromotionInfo:
    """Give calls to the run's plain name a kept step, or with None the newest one from now on."""
    return await _served(client, await client.promote(run, step))


async def roll_back(client: InsituClient, run: str) -> PromotionInfo:
    """Return to what was promoted before; raise Conflict if there is nothing."""
    made = await client.promotions(run)
    if not made:
        raise Conflict(
            f"nothing is promoted of run {run!r}", hint=f"promote a step: insitu promote {run}@STEP"
        )
    return await _served(client, await client.roll_back(run, made[-1].id))


def target_of(promotion: PromotionInfo) -> str:
    """Return what calls to the run's plain name are to get."""
    if promotion.step is None:
        return f"the newest step of {promotion.run}"
    return policy_name(promotion.run, promotion.step)


async def _served(client: InsituClient, promotion: PromotionInfo) -> PromotionInfo:
    """Wait until a decision is served, or it is known why not. A run that is not ready is not waited for."""
    run, asked = await client.get_run(promotion.run), promotion
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _WAIT_SECONDS
    while promotion.reason and run.state in (RunState.READY, RunState.LOADING) and loop.time() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
        found = [each for each in await client.promotions(asked.run) if each.id == asked.id]
        promotion = found[0] if found else promotion
        if promotion.reason not in ("", asked.reason):
            raise ChildFailed(
                f"{target_of(promotion)} is promoted and cannot be served: {promotion.reason}",
                hint=f"undo it: insitu rollback {asked.run}, or insitu promote {asked.run} --newest",
            )
    return promotion
