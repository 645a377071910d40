"""Promotions: calls to a run's plain name get the promoted step, while rollouts and training go on.

    decision in the ledger ─► step loaded beside the others ─► the name moves ─► the earlier one drains, goes

Decisions live in the ledger, where the API writes them; what is loaded for them lives here. A step that
cannot be loaded replaces nothing: the name keeps its version until a later try succeeds. After a start there
is no version to keep, and the name is not served: no other weights ever stand in for the promoted ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from insitu.backend.ledger import Ledger, Promotion, Run
from insitu.backend.plan.settings import ServeSettings
from insitu.backend.progress.phases import Say
from insitu.backend.serving.host import ModelHost
from insitu.backend.serving.reasons import first_line
from insitu.backend.serving.traffic import Promoted, Traffic
from insitu.backend.serving.version_leases import until_done
from insitu.errors import Conflict, InsituError, describe
from insitu.types import policy_name
from insitu.wire.routing_table import Served

_AGAIN_SECONDS = 10.0
"""After a promoted step could not be loaded."""
log = logging.getLogger(__name__)


class Promotions:
    """Serves what is promoted. Only the registrar calls it."""

    def __init__(self, settings: ServeSettings, ledger: Ledger, traffic: Traffic, say: Say) -> None:
        self._settings = settings
        self._ledger = ledger
        self._traffic = traffic
        self._say = say
        self._followed: dict[str, int] = {}
        """The last decision about each run, by id, that is served."""
        self._again_at: dict[str, float] = {}
        self._host: ModelHost | None = None
        self._retiring: set[asyncio.Task[None]] = set()

    async def open(self, run: Run, host: ModelHost) -> None:
        """Load what is promoted of a run, before anything of it is routed."""
        if host is not self._host:
            self._traffic.promoted.clear()  # it went with the engines
            self._host = host
        self._followed.pop(run.name, None)
        promotion = (await asyncio.to_thread(self._ledger.current_promotions)).get(run.name)
        if promotion is None:
            return
        reason = await self._follow(run, promotion, host)
        if reason and promotion.step is not None and run.name not in self._traffic.promoted:
            self._traffic.promoted[run.name] = Promoted(promotion.step, None)

    def forget(self, run: str) -> None:
        """Forget a run that is not loaded any more."""
        self._followed.pop(run, None)
        self._again_at.pop(run, None)

    async def tend(self, runs: Sequence[str], host: ModelHost | None) -> None:
        """Follow the decisions since the last time; retry those that could not be served."""
        promotions = await asyncio.to_thread(self._ledger.current_promotions)
        for name in runs:
            promotion = promotions.get(name)
            if host is None or promotion is None or name not in self._traffic.runs:
                continue
            if self._followed.get(name) == promotion.id:
                continue
            if time.monotonic() >= self._again_at.get(name, 0.0):
                run = await asyncio.to_thread(self._ledger.get_run, name)
                await self._follow(run, promotion, host)

    async def _follow(self, run: Run, promotion: Promotion, host: ModelHost) -> str:
        """Serve a decision and record that; return why it cannot be served, empty if it can."""
        before, reason = self._traffic.promoted.get(run.name), ""
        try:
            if promotion.step is None:
                self._traffic.promoted.pop(run.name, None)
            else:
                served = await self._load(run, promotion, promotion.step, host)
                self._traffic.promoted[run.name] = Promoted(promotion.step, served)
        except (InsituError, OSError) as error:  # OSError: the disk is broken
            reason = describe(error)
            self._again_at[run.name] = time.monotonic() + _AGAIN_SECONDS
        else:
            self._followed[run.name] = promotion.id
            await self._traffic.offer()
            self._release(run.name, before, host)
        if reason != promotion.reason:
            await asyncio.to_thread(self._ledger.explain_promotion, promotion, reason)
            self._tell(run.name, promotion.step, reason)
        return reason

    async def _load(self, run: Run, promotion: Promotion, step: int, host: ModelHost) -> Served:
        """Return the promoted step as the engines have it; load it unless they do."""
        await asyncio.to_thread(self._check_weights, promotion, step)
        if (there := self._traffic.loaded(run.name, step)) is not None:
            return there
        try:
            return await host.lend(run, step)
        except (InsituError, OSError):
            await until_done(lambda: host.roll_back(run))
            raise

    def _check_weights(self, promotion: Promotion, step: int) -> None:
        """Reject a step whose checkpoint is not the one that was promoted."""
        kept = {each.step: each.manifest_sha256 for each in self._ledger.checkpoints(promotion.run)}
        if kept.get(step) != promotion.manifest_sha256:
            how = "was trained again since it was promoted" if step in kept else "is not kept any more"
            raise Conflict(
                f"{policy_name(promotion.run, step)} {how}",
                hint=f"promote a kept step: insitu runs show {promotion.run} lists them",
            )

    def _release(self, run: str, before: Promoted | None, host: ModelHost) -> None:
        """Unload the version that was promoted before in the background, unless another name needs it."""
        served = None if before is None else before.served
        if served is None or served == host.publisher.base or self._traffic.is_routed(served):
            return
        task = asyncio.create_task(self._unload(run, served, host))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _unload(self, run: str, served: Served, host: ModelHost) -> None:
        try:
            await self._traffic.drained(self._settings.deadlines.drain, served.version)
            await host.retire(served)
        except InsituError:
            log.exception("the version of run %s that was promoted before stays for now", run)

    def _tell(self, run: str, step: int | None, reason: str) -> None:
        what = "the newest step" if step is None else policy_name(run, step)
        if reason:
            log.warning("%s is promoted and cannot be served: %s", what, reason)
            self._say(f"run {run}: {what} is promoted and cannot be served: {first_line(reason)}")
        else:
            self._say(f"run {run}: calls to {run} get {what}")
