"""Suspects: calls whose engine was lost while it worked on them, and requests that two engines were lost on.

    first loss  ──► tried once more, for some time only where no other suspect is at work
    second loss ──► no further attempt; the same request of the same rollout is rejected for some minutes

One request can end an engine, and each attempt at it would end another. Most calls that were lost are
innocent: they were beside it. Apart from each other, a second loss points at one of them. What counts is an
engine that goes away by itself; one that the supervisor takes out is in no table by then.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

import orjson

from insitu.errors import InvalidRequest
from insitu.gateway.calls.attempt import CallContext

ALONE_SECONDS = 30.0
"""A suspect waits this long for a replica without another one."""
_REJECTED_SECONDS = 300.0
_MOST_REJECTED = 1024


class Suspects:
    """The suspects of one gateway."""

    def __init__(self) -> None:
        self.num_rejected = 0
        self._at_work: Counter[str] = Counter()
        self._until: dict[bytes, float] = {}

    def check(self, context: CallContext) -> None:
        """Reject a request on which two engines were lost."""
        if not self._until:
            return
        now = time.monotonic()
        self._until = {digest: until for digest, until in self._until.items() if until > now}
        if (until := self._until.get(_digest(context))) is not None:
            self.num_rejected += 1
            raise InvalidRequest(
                "Two engines were lost while they worked on this very request, so it is not retried.",
                hint=f"change it, or send it again in {until - now:.0f} s; the gateway's log has the engines",
            )

    def reject(self, context: CallContext) -> None:
        """Reject this request for some minutes."""
        while len(self._until) >= _MOST_REJECTED:
            del self._until[next(iter(self._until))]
        self._until[_digest(context)] = time.monotonic() + _REJECTED_SECONDS

    def places(self) -> list[str]:
        """Return the replicas on which suspects are at work."""
        return [replica for replica, count in self._at_work.items() if count]

    @contextmanager
    def at_work(self, replica: str) -> Generator[None]:
        """Count a suspect on a replica."""
        self._at_work[replica] += 1
        try:
            yield
        finally:
            self._at_work[replica] -= 1


def _digest(context: CallContext) -> bytes:
    """Return what is the same for the same request of the same rollout; siblings have other rollouts."""
    whole = [context.project.name, context.labels.rollout_id, context.protocol.name, context.request.body]
    data = orjson.dumps(whole, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return hashlib.blake2b(data, digest_size=16).digest()
