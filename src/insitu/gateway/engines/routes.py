"""Routing and admission of calls: the routing table, the hold, and the calls under way.

The supervisor replaces the table whole (`PUT /control/routes`). A call passes `admit`, which waits while
the table holds calls, and is resolved against the table that is current when it leaves. `leased` counts the
resolved version until the call has been recorded: the supervisor waits for zero there before it retires
weights.

A run that is not in the table may be idle: the call waits, and `wanted` tells the supervisor. The next table
has the run, or says why not.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from insitu.access.projects import EVERYTHING, Project
from insitu.errors import Conflict, InsituError, InvalidRequest, NotFound, Unavailable
from insitu.types import parse_policy, policy_name
from insitu.wire.engine import MAX_LORAS
from insitu.wire.message import describe
from insitu.wire.routing_table import Hold, NotServed, RoutingTable, Served, ServedBase
from insitu.wire.values import STORED_PATTERN

_ROUTING_TABLE = TypeAdapter(RoutingTable)
_HOLDS_SECONDS = 2.0
"""The time for which a table's word on a run that it does not have is taken; after it, it is asked again."""
_ASKS_SECONDS = 10.0
"""The supervisor asks twice a second; without one, a name that no table has is unknown."""


@dataclass(frozen=True, slots=True)
class Target:
    """One policy version as an engine serves it."""

    name: str
    """The full name a client could use: `<run>@<step>` or the base model's name."""
    run: str | None
    step: int
    engine_model: str
    version: str | None
    """The version that the engine must report. None for a foreign engine: whatever it reports is recorded."""
    is_adapter: bool = False
    """An adapter is served under its version's own name; full weights under the base's."""


@dataclass(frozen=True, slots=True)
class Table:
    """A resolved routing table: every name with its target."""

    revision: int
    hold: Hold | None
    replicas: dict[str, str]
    base: Target | None
    base_refusal: str | None
    runs: dict[str, dict[int, Target]]
    latest: dict[str, int]
    promoted: dict[str, int] = field(default_factory=dict[str, int])
    extra: dict[str, Target] = field(default_factory=dict[str, Target])
    """Further models of a foreign engine, by name."""
    not_served: dict[str, NotServed] = field(default_factory=dict[str, NotServed])
    """Why runs that calls asked for are not in the table; it holds for a moment."""
    places: int | None = None
    max_loras: int = MAX_LORAS
    """Calls that each replica takes at once; None if it takes any number."""
    arrived: float = field(default_factory=time.monotonic)

    def resolve(self, model: str, project: Project = EVERYTHING, *, rollout_id: str | None = None) -> Target:
        """Return the version that `model` names now to a project; NotFound says what is served instead.

        A run's own name is its promoted step. In a rollout it is the newest one: its calls may be trained on.
        """
        run, step = parse_policy(project.stored(model))
        if run in self.runs:
            promoted = self.promoted.get(run) if step is None and rollout_id is None else None
            wanted = self.latest.get(run) if step is None else step
            wanted = wanted if promoted is None else promoted
            if wanted in self.runs[run]:
                return self.runs[run][wanted]
            shown = project.shown(run)
            served = ", ".join(policy_name(shown, s) for s in sorted(self.runs[run])) or "none"
            what = f"Run `{shown}`" if wanted is None else f"Step {wanted} of run `{shown}`"
            why = "" if promoted is None else ", which is promoted, could not be loaded and"
            raise NotFound(f"{what}{why} is not served.", hint=f"served steps: {served}")
        if model in self.extra:
            return self.extra[model]
        if self.base is not None and model == self.base.name:
            if self.base_refusal:
                why = project.reason(self.base_refusal)
                raise NotFound(
                    f"The base model `{model}` is not served now: {why}", hint=self._offer(project)
                )
            return self.base
        raise NotFound(f"Model `{model}` is not served here.", hint=self._offer(project))

    def missing(self, model: str, project: Project = EVERYTHING) -> str | None:
        """Return the stored name of the run that `model` names, if it is none of the table's."""
        if model in self.extra or (self.base is not None and model == self.base.name):
            return None
        run, step = parse_policy(project.stored(model))
        known = run in self.runs and (step is not None or run in self.latest or run in self.promoted)
        return None if known or not STORED_PATTERN.fullmatch(run) else run

    def names(self, project: Project = EVERYTHING) -> list[str]:
        """Return every name that a client of a project may use now."""
        base = [self.base.name] if self.base is not None and not self.base_refusal else []
        versions = [policy_name(run, step) for run, steps in self.runs.items() for step in sorted(steps)]
        own = [project.shown(name) for name in [*self.latest, *versions] if project.owns(name)]
        return base + list(self.extra) + own

    def _offer(self, project: Project) -> str:
        return "served: " + (", ".join(self.names(project)) or "nothing yet")


def parse_table(body: bytes) -> Table:
    """Parse the body of a `PUT /control/routes`; InvalidRequest names what is wrong."""
    try:
        sent = _ROUTING_TABLE.validate_json(body)
    except ValidationError as error:
        raise InvalidRequest(f"Not a routing table: {describe(error.errors())}") from error
    return Table(
        revision=sent.epoch,
        hold=sent.hold,
        replicas={replica.id: replica.url.rstrip("/") for replica in sent.replicas},
        base=None if sent.base is None else _target(sent.base, sent.base.name, None, 0),
        base_refusal=None if sent.base is None else sent.base.refusal,
        runs={
            name: {
                step: _target(served, policy_name(name, step), name, step)
                for step, served in run.served.items()
            }
            for name, run in sent.runs.items()
        },
        latest={name: run.latest for name, run in sent.runs.items() if run.latest is not None},
        promoted={name: run.promoted for name, run in sent.runs.items() if run.promoted is not None},
        not_served=sent.not_served,
        places=sent.places,
        max_loras=sent.max_loras,
    )


def _target(served: Served | ServedBase, name: str, run: str | None, step: int) -> Target:
    is_adapter = run is not None and served.engine_model == served.version
    return Target(name, run, step, served.engine_model, served.version, is_adapter)


class Routes:
    """The current table, the calls it holds, and the versions that calls under way are using."""

    def __init__(self, *, default_hold_seconds: float) -> None:
        self.table: Table | None = None
        self.wanted: Counter[str] = Counter()
        """Calls that wait for a run that is not in the table, by its stored name."""
        self._asked = -math.inf
        """The time when the supervisor last asked what is wanted."""
        self._called: dict[str, float] = {}
        """The time of the last call to each run of the table that was called."""
        self._busy: Counter[str] = Counter()
        """Calls under way, by run."""
        self.in_flight: Counter[str] = Counter()
        self.held = 0
        self.closing = False
        """The process is shutting down; calls still under way are cut off."""
        self._default_hold_seconds = default_hold_seconds
        self._changed = asyncio.Event()

    def replace(self, table: Table) -> None:
        """Install a newer table (the same revision may be sent again) and wake the waiting calls."""
        if self.table is not None and table.revision < self.table.revision:
            raise Conflict(f"Routing table {table.revision} is older than the current {self.table.revision}.")
        self.table = table
        self._called = {run: at for run, at in self._called.items() if run in table.runs}
        self.wake()

    def wants(self) -> list[str]:
        """Tell the supervisor which runs calls wait for. While it asks, unknown names may be idle runs."""
        self._asked = time.monotonic()
        return list(self.wanted)

    def _is_asked(self) -> bool:
        return time.monotonic() - self._asked < _ASKS_SECONDS

    def silent(self) -> dict[str, float]:
        """Return the seconds since the last call to each run; 0 while one is under way."""
        now = time.monotonic()
        return {run: 0.0 if self._busy[run] else now - at for run, at in self._called.items()}

    def wake(self) -> None:
        """Let every waiting call check again: the table or the health of a replica changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Admit no further calls: the process is shutting down."""
        self.closing = True
        self.wake()

    async def changed(self, seconds: float) -> bool:
        """Wait for the next change, at most `seconds`; return False if none came."""
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def admit(self, model: str, project: Project = EVERYTHING) -> Table:
        """Wait out any hold on a project's `model`, return the table.

        Overloaded if too many calls wait, Unavailable at the deadline.
        """
        table = self._open_table(project.stored(model))
        if table is None:
            table = await self._released(project.stored(model), project)
        if self._is_asked() and (run := table.missing(model, project)) is not None:
            table = await self._brought_back(run, model, project)
        return table

    async def _released(self, stored: str, project: Project) -> Table:
        """Return the table that holds calls no longer."""
        with self.waiting():
            started = time.monotonic()
            while (table := self._open_table(stored)) is None:
                reason, allowed = self._hold_terms()
                left = started + allowed - time.monotonic()
                if left <= 0:
                    why = reason if self.table is None else project.reason(reason)
                    raise Unavailable(f"The call was held for {allowed:.0f} s: {why}.", hint="retry later")
                await self.changed(left)
        return table

    async def _brought_back(self, run: str, model: str, project: Project) -> Table:
        """Return a table that has the run, or has nothing to say against its own answer to the call."""
        began, stored = time.monotonic(), project.stored(model)
        self.wanted[run] += 1
        try:
            while True:
                table = self._open_table(stored) or await self._released(stored, project)
                if table.missing(model, project) is None:
                    return table
                answer = table.not_served.get(run)
                if answer is not None and time.monotonic() - table.arrived < _HOLDS_SECONDS:
                    if not answer.reason:
                        return table
                    raise _refusal(answer)
                left = began + self._default_hold_seconds - time.monotonic()
                if left <= 0:
                    waited = f"{self._default_hold_seconds:.0f} s"
                    raise Unavailable(
                        f"Run `{project.shown(run)}` is not loaded, and was not within {waited}.",
                        hint="retry later",
                    )
                with self.waiting():
                    await self.changed(left)
        finally:
            self.wanted[run] -= 1
            if not self.wanted[run]:
                del self.wanted[run]

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Count a call as held."""
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1

    @contextmanager
    def leased(self, target: Target, num_calls: int = 1) -> Generator[None]:
        """Count calls against their version until they have been recorded."""
        key = target.version or target.name
        self.in_flight[key] += num_calls
        self._count(target.run, 1)
        try:
            yield
        finally:
            self.in_flight[key] -= num_calls
            if not self.in_flight[key]:
                del self.in_flight[key]
            self._count(target.run, -1)

    def _count(self, run: str | None, change: int) -> None:
        if run is not None:
            self._called[run] = time.monotonic()
            self._busy[run] += change
            if not self._busy[run]:
                del self._busy[run]

    def _open_table(self, model: str) -> Table | None:
        if self.closing:
            raise Unavailable("The gateway is shutting down.", hint="retry later")
        if self.table is None or (self.table.hold is not None and self.table.hold.passing != model):
            return None
        return self.table

    def _hold_terms(self) -> tuple[str, float]:
        if self.table is None or self.table.hold is None:
            return "no routing table has arrived yet", self._default_hold_seconds
        return self.table.hold.reason, self.table.hold.deadline_seconds


def _refusal(answer: NotServed) -> InsituError:
    return (Conflict if answer.held else Unavailable)(answer.reason, hint=answer.hint)
