"""What the gateway is told: which versions are served where, and when calls wait.

The table is sent whole and numbered; a gateway that was restarted reports another number and is sent the
table again, so there is nothing to recover.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import aiohttp

from insitu.errors import DeadlineExceeded, UpstreamError
from insitu.wire.routing_table import Hold, ReplicaAddress, RoutingTable, Served, ServedBase, ServedRun

_RETRY_SECONDS = 0.2
_POLL_SECONDS = 0.05
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Traffic:
    """The routing table of this backend and its way to the gateway."""

    http: aiohttp.ClientSession
    gateway_url: str
    admin_key: str = field(repr=False)
    push_seconds: float
    hold_seconds: float
    base: ServedBase | None = None
    replicas: Callable[[], dict[str, str]] = dict
    """The engines that calls may go to, by id; asked for every table, as one may have been replaced."""
    runs: dict[str, dict[int, Served]] = field(default_factory=dict[str, dict[int, Served]])
    latest: dict[str, int] = field(default_factory=dict[str, int])
    holds: list[str] = field(default_factory=list[str])
    revision: int = field(default_factory=lambda: int(time.time() * 1000))
    """Grows with every table, also over restarts of the supervisor."""

    def serve_version(self, run: str, step: int, served: Served) -> None:
        """Route `<run>@<step>` and move the alias `<run>` to it.

        Weights under the base model's own name have replaced whatever was there: earlier versions, and the
        base model itself unless these are its weights.
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

    async def push(self) -> None:
        """Send the table until the gateway has taken it."""
        self.revision += 1
        deadline = time.monotonic() + self.push_seconds
        while True:
            try:
                await self._request("PUT", "/control/routes", asdict(self._table()))
                return
            except (aiohttp.ClientError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"the gateway at {self.gateway_url} took no routing table in "
                        f"{self.push_seconds:.0f} s: {error!r}",
                        hint="see gateway.log in the state directory",
                    ) from error
                await asyncio.sleep(_RETRY_SECONDS)

    async def refresh(self) -> dict[str, Any] | None:
        """The gateway's state, after sending the table again when it lacks it; None when it is away."""
        try:
            state = await self._request("GET", "/control/state")
            revision = state["epoch"]
            if revision != self.revision and self.base is not None:
                log.warning("the gateway has table %s, not %s: sending it again", revision, self.revision)
                await self.push()
        except (aiohttp.ClientError, TimeoutError, DeadlineExceeded):
            return None
        return state

    @asynccontextmanager
    async def held(self, reason: str) -> AsyncIterator[None]:
        """New calls wait in the gateway inside this block; leaving it releases them on the table of then."""
        self.holds.append(reason)
        await self.push()
        try:
            yield
        finally:
            self.holds.remove(reason)
            await self.push()

    async def drained(self, deadline_seconds: float, version: str | None = None) -> None:
        """Wait until no call (on this version) is under way."""
        deadline = time.monotonic() + deadline_seconds
        while time.monotonic() < deadline:
            state = await self.refresh()
            if state is not None:
                left = state["in_flight_total"] if version is None else state["in_flight"].get(version, 0)
                if left == 0:
                    return
            await asyncio.sleep(_POLL_SECONDS)
        raise DeadlineExceeded(
            f"calls on {version or 'the engines'} did not end in {deadline_seconds:.0f} s",
            hint="shorten max_tokens of the agent, or raise --drain-seconds",
        )

    def _table(self) -> RoutingTable:
        return RoutingTable(
            epoch=self.revision,
            hold=Hold(self.holds[-1], self.hold_seconds) if self.holds else None,
            replicas=[ReplicaAddress(name, url) for name, url in self.replicas().items()],
            base=self.base,
            runs={run: ServedRun(self.latest[run], versions) for run, versions in self.runs.items()},
        )

    async def _request(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {self.admin_key}"}
        timeout = aiohttp.ClientTimeout(total=5)
        async with self.http.request(
            method, self.gateway_url + path, json=body, headers=headers, timeout=timeout
        ) as answer:
            if answer.status != 200:
                raise UpstreamError(f"the gateway answered {answer.status} to {path}: {await answer.text()}")
            return await answer.json()
