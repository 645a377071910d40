"""Version leases: a kept step, or the base model, is served as long as somebody evaluates it.

`adapter`: the version is loaded beside the others, and training goes on. `merged`: one version is served at a
time, so its weights replace the published ones while steps, registrations and all other calls wait::

    lease waits ─► calls held, drained ─► weights in ─► calls to run@3 pass ─► lease ready
                ─► released, expired   ─► calls held, drained ─► published weights back ─► calls released

Leases live in the ledger, where the API writes them; what is loaded for them lives here. A restarted backend
ends all leases and serves what is committed, so a crash at any point leads back to the published version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from insitu.access.projects import named_for
from insitu.backend.ledger import Job, Lease, Ledger, Run
from insitu.backend.plan.settings import ServeSettings
from insitu.backend.serving.host import ModelHost
from insitu.backend.serving.traffic import Traffic
from insitu.errors import CannotHonour, DeadlineExceeded, InsituError, describe
from insitu.types import LeaseState, RunState, policy_name
from insitu.wire.routing_table import Served

_AGAIN_SECONDS = 10.0
"""After a failure to bring the published weights back; calls stay held meanwhile."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Lent:
    """A version that is loaded for its leases."""

    run: str
    step: int
    served: Served
    hold: AsyncExitStack
    """Holds the calls to all other names; empty if they can be answered too."""

    @property
    def name(self) -> str:
        return policy_name(self.run, self.step)


class VersionLeases:
    """Loads what is leased and unloads it afterwards. Only the supervisor's work loop calls it."""

    def __init__(self, settings: ServeSettings, ledger: Ledger, traffic: Traffic) -> None:
        self._settings = settings
        self._ledger = ledger
        self._traffic = traffic
        self._merged = settings.publication == "merged"
        self._host: ModelHost | None = None
        self._lent: dict[tuple[str, int], _Lent] = {}
        self._open: list[Lease] = []
        self._said: tuple[str, str] | None = None
        """The last job that waited, and what it was told."""

    @property
    def exclusive(self) -> bool:
        """True while a lease keeps merged weights: no step and no registration may replace them."""
        return self._merged and bool(self._lent)

    async def end_all(self) -> None:
        """End the leases of an earlier supervisor; called at start."""
        for lease in await asyncio.to_thread(self._ledger.end_leases, "the backend was restarted"):
            log.warning("the lease %s of %s was open when the last supervisor ended", lease.id, lease.model)

    async def tend(self, host: ModelHost | None, job: Job | None) -> None:
        """Unload versions whose leases have ended, then load those that are waited for.

        `job` is the next step in the queue. With merged weights it goes before leases that are younger.
        """
        self._open = await asyncio.to_thread(self._ledger.open_leases)
        if host is not self._host:
            await self._engines_replaced()
            self._host = host
        held = {(lease.run, lease.step) for lease in self._open}
        for lent in [lent for key, lent in self._lent.items() if key not in held]:
            assert host is not None, "what is lent is on its engines"
            await self._take_back(lent, host)
        for lease in self._open:
            if lease.state is LeaseState.WAITING:
                await self._serve(lease, host, job)

    async def say_waiting(self, job: Job) -> None:
        """Record which evaluation a queued step waits for."""
        (name,) = [lent.name for lent in self._lent.values()]
        seconds = max(lease.seconds for lease in self._open if lease.model == name)
        shown = named_for(job.run, name)
        phase = f"waits for the evaluation of {shown}, at most {seconds:.0f} s unless it is renewed"
        if self._said != (job.id, phase):
            await asyncio.to_thread(self._ledger.set_waiting, job.id, phase)
            self._said = (job.id, phase)

    async def _engines_replaced(self) -> None:
        """Forget what was lent on engines that are gone, and end its leases."""
        for lent in self._lent.values():
            self._traffic.take_back(lent.run, lent.step)
        self._lent.clear()
        for lease in self._open:
            if lease.state is LeaseState.READY:
                await asyncio.to_thread(self._ledger.end_lease, lease, "the engines were replaced")
        self._open = [lease for lease in self._open if lease.state is not LeaseState.READY]

    async def _serve(self, lease: Lease, host: ModelHost | None, job: Job | None) -> None:
        """Load the lease's version, unless it is loaded or something else goes first, which is recorded."""
        key = (lease.run, lease.step)
        if key not in self._lent:
            if (reason := self._goes_first(lease, job)) is not None:
                if reason != lease.reason:
                    await asyncio.to_thread(self._ledger.explain_lease, lease, reason)
                return
            try:
                run = await asyncio.to_thread(self._ledger.get_run, lease.run)
                self._lent[key] = await self._lend(run, lease, _suitable(host, run))
            except (InsituError, OSError) as error:  # OSError: the disk is full or broken
                log.exception("%s cannot be served for evaluation", lease.model)
                why = f"{lease.model} could not be loaded: {describe(error)}"
                await asyncio.to_thread(self._ledger.end_lease, lease, why)
                return
            log.info("%s is served for evaluation", lease.model)
        await asyncio.to_thread(self._ledger.make_lease_ready, lease)

    def _goes_first(self, lease: Lease, job: Job | None) -> str | None:
        """Return what a lease has to wait for; None if it is its turn."""
        if not self._merged:
            return None
        for lent in self._lent.values():
            name = named_for(lease.run, lent.name)
            return f"one version is served at a time: it waits for the lease of {name}"
        if job is not None and job.created_at < lease.created_at:
            name = named_for(lease.run, job.run)
            return f"it waits for a step of {f'run {name}, {job.id}' if name == job.run else name}"
        return None

    async def _lend(self, run: Run, lease: Lease, host: ModelHost) -> _Lent:
        """Load and route the version; on failure, return only when the published one is back."""
        own = self._traffic.loaded(run.name, lease.step)
        replaces = self._merged and own is None
        hold = AsyncExitStack()
        async with AsyncExitStack() as stack:
            if replaces:
                await stack.enter_async_context(self._traffic.held(f"{lease.model} is loaded for evaluation"))
                await self._traffic.drained(self._settings.deadlines.drain)
            on_failure = await stack.enter_async_context(AsyncExitStack())
            served = own or await self._loaded(run, lease.step, host, on_failure)
            on_failure.callback(self._traffic.take_back, lease.run, lease.step)
            self._traffic.lend(lease.run, lease.step, served)
            if replaces:
                other_calls = self._traffic.held(f"{lease.model} is evaluated", passing=lease.model)
                await hold.enter_async_context(other_calls)
            else:
                await self._traffic.push()
            on_failure.pop_all()
        return _Lent(lease.run, lease.step, served, hold)

    async def _loaded(self, run: Run, step: int, host: ModelHost, on_failure: AsyncExitStack) -> Served:
        on_failure.push_async_callback(until_done, lambda: host.roll_back(run))
        served = await host.lend(run, step)
        on_failure.push_async_callback(until_done, lambda: host.take_back(run.name, served))
        return served

    async def _take_back(self, lent: _Lent, host: ModelHost) -> None:
        """Drain the calls on a version and unload it; calls to the published one go on afterwards."""
        promoted = self._traffic.promoted.get(lent.run)
        published = self._traffic.runs.get(lent.run, {}).get(lent.step) == lent.served
        published = published or (promoted is not None and promoted.served == lent.served)
        async with AsyncExitStack() as stack:
            if self._merged and not published:
                reason = f"the evaluation of {lent.name} has ended"
                await stack.enter_async_context(self._traffic.held(reason))
            await lent.hold.aclose()
            self._traffic.take_back(lent.run, lent.step)
            if not published:
                await self._traffic.offer()
                await self._free_of_calls(lent, host)
                await until_done(lambda: host.take_back(lent.run, lent.served))
            del self._lent[lent.run, lent.step]
        log.info("the evaluation of %s has ended", lent.name)

    async def _free_of_calls(self, lent: _Lent, host: ModelHost) -> None:
        """Wait until no call uses the version; calls that do not end are cut off."""
        if not self._merged and lent.served == host.publisher.base:
            return  # the base model stays, and so do its calls
        try:
            await self._traffic.drained(self._settings.deadlines.drain, lent.served.version)
        except DeadlineExceeded as error:
            log.warning("calls on %s are cut off: %s", lent.name, error.message)
            if self._merged:
                await until_done(host.lease.replace_all)


def _suitable(host: ModelHost | None, run: Run) -> ModelHost:
    """Return the engines, unless they cannot load versions of this run."""
    register = f"register run {run.name} again: POST /v1/runs"
    if host is None:
        raise CannotHonour("no model is loaded now", hint=register)
    engine = host.engine
    if run.state not in (RunState.READY, RunState.IDLE, RunState.CLOSED):
        raise CannotHonour(f"run {run.name} is {run.state}", hint=register)
    if run.base_model not in (engine.served_name, engine.model):
        raise CannotHonour(
            f"run {run.name} is on {run.base_model}; this backend serves {engine.served_name}", hint=register
        )
    if engine.publication == "adapter" and run.lora.rank > engine.max_lora_rank:
        raise CannotHonour(
            f"run {run.name} has LoRA rank {run.lora.rank}; the engines take up to {engine.max_lora_rank}",
            hint=register,
        )
    return host


async def until_done(action: Callable[[], Awaitable[None]]) -> None:
    """Repeat an action until it succeeds, as the supervisor does with engines that do not start."""
    while True:
        try:
            await action()
        except InsituError:
            log.exception("an engine is not back at the published version and is tried again")
            await asyncio.sleep(_AGAIN_SECONDS)
        else:
            return
