"""The routing table sent to the gateways: which versions are served where, and when calls wait.

The table is sent whole and numbered, the same one to all. A restarted gateway reports a different number and
is sent the table again, so it has nothing to recover. A call counts as ended when no gateway has it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import aiohttp

from insitu.backend.serving.own_certificate import OwnCertificate
from insitu.errors import DeadlineExceeded, UpstreamError
from insitu.system.tasks import all_or_none
from insitu.wire.engine import MAX_LORAS
from insitu.wire.gateway_state import GatewayState, ReplicaState, TableReceipt
from insitu.wire.message import Malformed, Message, encode, read
from insitu.wire.routing_table import (
    Hold,
    NotServed,
    ReplicaAddress,
    RoutingTable,
    Served,
    ServedBase,
    ServedRun,
)

_RETRY_SECONDS = 0.2
_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 1.0
Received = TypeVar("Received", bound=Message)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Promoted:
    """The step that a run's own name resolves to outside rollouts."""

    step: int
    served: Served | None
    """None if it could not be loaded: then the name resolves to nothing."""


@dataclass(slots=True)
class Traffic:
    """This backend's routing table, and its delivery to the gateways."""

    http: aiohttp.ClientSession
    gateway_urls: Sequence[str]
    admin_key: str = field(repr=False)
    push_seconds: float
    hold_seconds: float
    trust: OwnCertificate | None = None
    """The gateways' certificate, if they speak HTTPS."""
    base: ServedBase | None = None
    replicas: Callable[[], dict[str, str]] = dict
    """Returns the URLs of the engines that take calls, by id; called per table, as engines get replaced."""
    runs: dict[str, dict[int, Served]] = field(default_factory=dict[str, dict[int, Served]])
    latest: dict[str, int] = field(default_factory=dict[str, int])
    lent: dict[str, dict[int, Served]] = field(default_factory=dict[str, dict[int, Served]])
    """Versions that are served for evaluation besides, or with merged weights instead."""
    promoted: dict[str, Promoted] = field(default_factory=dict[str, Promoted])
    """The promoted steps of runs that do not follow their newest one."""
    holds: list[tuple[str, str | None]] = field(default_factory=list[tuple[str, str | None]])
    """Reasons to hold calls, each with the one name that passes; the last one counts."""
    answers: dict[str, tuple[NotServed, float]] = field(default_factory=dict[str, tuple[NotServed, float]])
    """Answers to the gateways about runs that calls ask for and that are not served, with their times."""
    places: int | None = None
    """Calls that an engine takes at once from each gateway."""
    max_loras: int = MAX_LORAS
    """Adapters that an engine computes in one batch."""
    revision: int = field(default_factory=lambda: int(time.time() * 1000))
    """Increases with every table, also across restarts of the supervisor."""
    _sent: dict[str, str] = field(default_factory=dict[str, str])
    """The replicas of the last table."""
    _sending: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    """One table at a time: a gateway refuses one that is older than its own."""

    def serve_version(self, run: str, step: int, served: Served) -> None:
        """Route `<run>@<step>` and move the alias `<run>` to it.

        Weights served under the base model's own name replace the earlier versions and, unless they are its
        own weights, the base model itself.
        """
        if self.base is not None and served.engine_model == self.base.engine_model:
            self.runs[run] = {}
            replaced = served.version != self.base.version
            refusal = f"merged publication serves one version at a time, now {served.version}"
            self.base = replace(self.base, refusal=refusal if replaced else None)
        self.runs.setdefault(run, {})[step] = served
        self.latest[run] = step

    def drop_run(self, run: str) -> None:
        self.runs.pop(run, None)
        self.latest.pop(run, None)
        self.promoted.pop(run, None)

    def answer(self, answers: Mapping[str, NotServed]) -> None:
        """Have the next tables say why these runs are not served; for a moment, as that may change."""
        now = time.monotonic()
        self.answers |= {run: (answer, now) for run, answer in answers.items()}

    def lend(self, run: str, step: int, served: Served) -> None:
        """Route `<run>@<step>`, without moving the alias `<run>`."""
        self.lent.setdefault(run, {})[step] = served

    def take_back(self, run: str, step: int) -> None:
        """Stop routing to a version that was lent, unless it is one of the run's own."""
        self.lent[run].pop(step)
        if not self.lent[run]:
            del self.lent[run]

    def loaded(self, run: str, step: int) -> Served | None:
        """Return a version of the run that the engines have, because it is new or promoted."""
        promoted = self.promoted.get(run)
        if promoted is not None and promoted.step == step and promoted.served is not None:
            return promoted.served
        return self.runs.get(run, {}).get(step)

    def is_claimed(self, served: Served) -> bool:
        """Return True if a version is lent or promoted, so that it stays when newer ones replace it."""
        lent = any(served in versions.values() for versions in self.lent.values())
        return lent or any(served == promoted.served for promoted in self.promoted.values())

    def is_routed(self, served: Served) -> bool:
        """Return True if any name leads to a version."""
        return self.is_claimed(served) or any(served in steps.values() for steps in self.runs.values())

    async def push(self) -> None:
        """Send the table, retrying until every gateway has accepted it."""
        async with self._sending:
            self.revision += 1
            self._sent = self.replicas()
            table, deadline = self._table(), time.monotonic() + self.push_seconds
            await all_or_none(self._push(url, table, deadline) for url in self.gateway_urls)

    async def _push(self, url: str, table: RoutingTable, deadline: float) -> None:
        while True:
            try:
                await self._request(url, TableReceipt, "PUT", "/control/routes", table)
                return
            except (aiohttp.ClientError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"the gateway at {url} took no routing table in {self.push_seconds:.0f} s: {error!r}",
                        hint="see its log in the state directory",
                    ) from error
                await asyncio.sleep(_RETRY_SECONDS)

    async def offer(self) -> None:
        """Send the table once; a gateway that does not take it now is sent it when it answers again."""
        async with self._sending:
            self.revision += 1
            self._sent = self.replicas()
            await self._offer_to(self.gateway_urls)

    async def _offer_to(self, urls: Iterable[str]) -> None:
        table = self._table()
        sent = [self._push(url, table, 0.0) for url in urls]
        for error in await asyncio.gather(*sent, return_exceptions=True):
            if isinstance(error, DeadlineExceeded):
                log.warning("%s", error.message)
            elif error is not None:
                raise error

    async def refresh(self) -> GatewayState | None:
        """Return the state of all gateways together, as `answering` does; None if one is away."""
        states = await self._states()
        return None if None in states else _together(states)

    async def answering(self) -> GatewayState | None:
        """Return the state of the gateways that answer, sending them the table if theirs is outdated.

        None if no gateway answers.
        """
        return _together(await self._states())

    async def _states(self) -> list[GatewayState | None]:
        asked = [self._request(url, GatewayState, "GET", "/control/state") for url in self.gateway_urls]
        states: list[GatewayState | None] = []
        for found in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(found, BaseException) and not isinstance(found, aiohttp.ClientError | TimeoutError):
                raise found
            states.append(None if isinstance(found, BaseException) else found)
        if self.base is None or self._sending.locked():
            return states
        if self._sent != self.replicas():  # an engine was replaced
            await self.offer()
            return states
        outdated = {
            url: state.epoch
            for url, state in zip(self.gateway_urls, states, strict=True)
            if state is not None and state.epoch != self.revision
        }
        if outdated:
            log.warning("gateways have tables %s, not %s: it is sent", outdated, self.revision)
            async with self._sending:
                await self._offer_to(outdated)
        return states

    @asynccontextmanager
    async def held(self, reason: str, passing: str | None = None) -> AsyncGenerator[None]:
        """Hold new calls in the gateway inside this block; on exit, release them on the current table.

        Calls to the name `passing` go on.
        """
        hold = (reason, passing)
        self.holds.append(hold)
        try:
            await self.push()
            yield
        finally:
            self.holds.remove(hold)
            await self.offer()

    async def drained(self, deadline_seconds: float, version: str | None = None) -> None:
        """Wait until no call (on this version) is in flight."""

        def left(state: GatewayState) -> int:
            return state.in_flight_total if version is None else state.in_flight.get(version, 0)

        await self._ended(left, version or "the engines", deadline_seconds)

    async def emptied(self, replicas: Collection[str], deadline_seconds: float) -> None:
        """Wait until no call is on these engines, which have left the table."""

        def left(state: GatewayState) -> int:
            outdated = int(state.epoch != self.revision)  # its table may still have them
            return outdated + sum(state.leaving.get(name, 0) for name in replicas)

        await self._ended(left, " and ".join(sorted(replicas)), deadline_seconds)

    async def _ended(self, left: Callable[[GatewayState], int], where: str, deadline_seconds: float) -> None:
        deadline = time.monotonic() + deadline_seconds
        while time.monotonic() < deadline:
            state = await self.refresh()
            if state is not None and left(state) == 0:
                return
            await asyncio.sleep(_POLL_SECONDS)
        raise DeadlineExceeded(
            f"calls on {where} did not end in {deadline_seconds:.0f} s",
            hint="shorten max_tokens of the agent, or raise --drain-seconds",
        )

    def _table(self) -> RoutingTable:
        since = time.monotonic() - _ANSWER_SECONDS
        self.answers = {run: given for run, given in self.answers.items() if given[1] >= since}
        return RoutingTable(
            epoch=self.revision,
            hold=self._hold(),
            replicas=[ReplicaAddress(name, url) for name, url in self.replicas().items()],
            base=self.base,
            runs={run: self._served_run(run) for run in self.runs | self.lent},
            places=self.places,
            max_loras=self.max_loras,
            not_served={run: answer for run, (answer, _) in self.answers.items()},
        )

    def _hold(self) -> Hold | None:
        if not self.holds:
            return None
        reason, passing = self.holds[-1]
        return Hold(reason, self.hold_seconds, passing if len(self.holds) == 1 else None)

    def _served_run(self, run: str) -> ServedRun:
        served, promoted = self.lent.get(run, {}) | self.runs.get(run, {}), self.promoted.get(run)
        if promoted is None:
            return ServedRun(self.latest.get(run), served)
        beside = {} if promoted.served is None else {promoted.step: promoted.served}
        return ServedRun(self.latest.get(run), beside | served, promoted.step)

    async def _request(
        self, url: str, kind: type[Received], method: str, path: str, body: Message | None = None
    ) -> Received:
        headers = {"Authorization": f"Bearer {self.admin_key}", "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=5)
        data = None if body is None else encode(body)
        async with self.http.request(
            method,
            url + path,
            data=data,
            headers=headers,
            timeout=timeout,
            ssl=self.trust or True,
        ) as answer:
            content = await answer.read()
        text = content.decode("utf-8", "replace")
        if answer.status != 200:
            raise UpstreamError(f"the gateway at {url} answered {answer.status} to {path}: {text}")
        try:
            return read(kind, content)
        except Malformed as error:
            said = f"the gateway at {url} answered {path} with {text[:200]!r}: {error}"
            raise UpstreamError(said) from error


def _together(states: Sequence[GatewayState | None]) -> GatewayState | None:
    found = [state for state in states if state is not None]
    return together(found) if found else None


def together(states: Sequence[GatewayState]) -> GatewayState:
    """Return the state of several gateways as one: their counts added up, the oldest of their tables."""
    if len(states) == 1:
        return states[0]
    epochs = [state.epoch for state in states]
    return GatewayState(
        epoch=None if None in epochs else min(epoch for epoch in epochs if epoch is not None),
        held=sum(state.held for state in states),
        in_flight=_added(state.in_flight for state in states),
        in_flight_total=sum(state.in_flight_total for state in states),
        recorded=sum(state.recorded for state in states),
        record_backlog=sum(state.record_backlog for state in states),
        put_back=states[0].put_back | _added(_counts(state.put_back) for state in states),
        replicas={
            name: ReplicaState(
                all(state.replicas[name].healthy for state in states if name in state.replicas),
                sum(state.replicas[name].in_flight for state in states if name in state.replicas),
            )
            for name in dict.fromkeys(name for state in states for name in state.replicas)
        },
        leaving=_added(state.leaving for state in states),
        silent=_least(state.silent for state in states),
        wanted=list(dict.fromkeys(name for state in states for name in state.wanted)),
    )


def _least(seconds: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in seconds:
        for name, value in each.items():
            found[name] = min(value, found.get(name, value))
    return found


def _counts(report: Mapping[str, object]) -> dict[str, int]:
    return {name: value for name, value in report.items() if isinstance(value, int)}


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return counts by name, added up."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)
