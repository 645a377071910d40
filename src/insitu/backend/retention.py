"""Delete recorded calls that are older than `insitu serve --keep-calls` says, in small batches.

    every hour: find old rollouts ─► a line in the audit log ─► batches: delete what no open group names

The API takes no group with a call beyond that age, and calls are deleted an hour later than that: so no group
arrives whose calls are being deleted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from itertools import islice

from sqlalchemy.exc import SQLAlchemyError

from insitu.access.audit_log import HERE, AuditLog
from insitu.backend.ledger import Ledger
from insitu.errors import InsituError
from insitu.records.old_calls import OldRollout, Referred, days
from insitu.records.store import RecordStore

GRACE_SECONDS = 3600.0
"""Far longer than an upload takes from the check of its calls to its record in the ledger."""
_EVERY_SECONDS = 3600.0
_PAUSE_SECONDS = 0.2
"""Between two batches: the gateway writes to the same file."""
_MOST_ROLLOUTS = 10_000
"""In one sweep; the next one follows at once."""
_BATCH_CALLS = 500
"""At most, but for a longer rollout."""
log = logging.getLogger(__name__)


class Retention:
    """The deletion of old calls. It belongs to the supervisor, which alone knows what is referred to."""

    def __init__(
        self,
        records: RecordStore,
        ledger: Ledger,
        audit: AuditLog,
        keep_seconds: float,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.num_calls = self.num_rollouts = 0
        """Deleted since the start; a call outside any rollout counts as one."""
        self._records = records
        self._ledger = ledger
        self._audit = audit
        self._keep_seconds = keep_seconds
        self._clock = clock

    async def run(self) -> None:
        """Sweep every hour, until cancelled; a failure is logged, and the next sweep tries again."""
        while True:
            more = False
            try:
                more = await self.sweep()
            except (InsituError, SQLAlchemyError, OSError):
                log.exception("old calls are not deleted; the next try is in an hour")
            await asyncio.sleep(_PAUSE_SECONDS if more else _EVERY_SECONDS)

    async def sweep(self) -> bool:
        """Delete what is old now; return True if there may be more."""
        before = self._clock() - self._keep_seconds - GRACE_SECONDS
        found = await asyncio.to_thread(self._find, before)
        if not found:
            return False
        num_calls = sum(len(rollout.call_ids) for rollout in found)
        what = f"{num_calls} of {len(found)} rollouts, older than {days(self._keep_seconds)}"
        self._audit.note("supervisor", f"calls delete {what}", HERE)
        calls_before, rollouts_before = self.num_calls, self.num_rollouts
        for batch in _batches(found):
            deleted = await asyncio.to_thread(self._delete, batch, before)
            self.num_rollouts += len(deleted)
            self.num_calls += sum(len(rollout.call_ids) for rollout in deleted)
            await asyncio.sleep(_PAUSE_SECONDS)
        log.info(
            "deleted %d calls of %d rollouts, older than %s",
            self.num_calls - calls_before,
            self.num_rollouts - rollouts_before,
            days(self._keep_seconds),
        )
        return len(found) == _MOST_ROLLOUTS

    def _find(self, before: float) -> list[OldRollout]:
        return list(islice(self._records.find_old(before, referred_calls(self._ledger)), _MOST_ROLLOUTS))

    def _delete(self, batch: list[OldRollout], before: float) -> list[OldRollout]:
        # Asked again for each batch: groups arrive and jobs are queued again meanwhile.
        return self._records.delete_old(batch, before, referred_calls(self._ledger))


def referred_calls(ledger: Ledger, *, but_of: str | None = None) -> Referred:
    """Return the question which calls of some rollouts open groups, but those of one run, still need.

    A rollout belongs to one group, so its name decides; only calls outside any are looked for in the groups.
    """

    def referred(rollouts: Sequence[OldRollout]) -> set[str]:
        names = [rollout.rollout_id for rollout in rollouts if rollout.rollout_id is not None]
        is_open = ledger.open_rollouts(names, but_of=but_of)
        loose = {one for rollout in rollouts if rollout.rollout_id is None for one in rollout.call_ids}
        found = ledger.open_calls(loose, but_of=but_of) if loose else set[str]()
        for rollout in rollouts:
            if rollout.rollout_id in is_open:
                found.update(rollout.call_ids)
        return found

    return referred


def _batches(rollouts: list[OldRollout]) -> list[list[OldRollout]]:
    batches: list[list[OldRollout]] = []
    room = 0
    for rollout in rollouts:
        room -= len(rollout.call_ids)
        if room < 0:
            batches.append([])
            room = _BATCH_CALLS - len(rollout.call_ids)
        batches[-1].append(rollout)
    return batches
