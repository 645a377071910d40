"""The recorder: a bounded queue and one writer thread that commits calls in groups, off the hot path.

    handlers ── submit ──► queue ── linger ──► writer thread ── append(batch) ──► RecordStore (durable)
             └─ count ──┘

The writer lingers before each commit unless somebody waits for it, so that calls share a transaction; those
that linger are in the journal already. Whatever arrived during one commit is in the next, too. When the store
cannot be written (disk full), the batch is kept and retried; meanwhile `refusal` gives the reason, and the
gateway takes no new calls. A call that the store does not take at all is dropped and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future

from insitu.database.engine import OUTAGES, cause_of
from insitu.errors import DeadlineExceeded, InsituError, attempt
from insitu.gateway.recording.journal import Journal
from insitu.gateway.recording.tally import Tally
from insitu.records.store import RecordStore
from insitu.types import ModelCall

_log = logging.getLogger(__name__)
_MAX_BATCH = 256
_LINGER_SECONDS = 0.1
"""Longest time from a call's end to the commit that holds it, while nobody waits."""
_RETRY_SECONDS = 1.0
_PASSING = (*OUTAGES, OSError)
"""Any other failure is the fault of one entry, and would never pass."""


class Recorder:
    """Writes submitted calls to a store in the background."""

    def __init__(self, store: RecordStore, *, max_backlog: int, journal: Journal | None = None) -> None:
        self.num_recorded = 0
        self.num_lost = 0
        """Calls that the store did not take."""
        self._journal = journal
        self._store = store
        self._max_backlog = max_backlog
        self._queue: list[ModelCall | Tally] = []
        self._writing = 0
        self._num_submitted = self._num_written = 0
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        """Futures and the number of written entries that each waits for, in ascending order."""
        self._error: str | None = None
        self._closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    @property
    def backlog(self) -> int:
        """Calls and new rollouts submitted but not yet durable."""
        return len(self._queue) + self._writing

    def refusal(self) -> str | None:
        """Return the reason why no new call should be accepted now, or None."""
        if self._error is not None:
            return f"calls cannot be recorded: {self._error}"
        if self.backlog >= self._max_backlog:
            return f"{self.backlog} recorded calls are waiting to be written"
        return None

    def submit(self, call: ModelCall) -> Future[None] | None:
        """Queue a finished call: `refusal` is checked before a call starts.

        Return None if the call outlives this process from now on, else a future that is done when it does.
        """
        with self._wake:
            if self._closing:
                raise InsituError(
                    f"Call {call.id} finished after the recorder was closed; it is not recorded."
                )
            kept = self._keep(call)
            self._put(call)
            return None if kept else self.written()

    def _keep(self, call: ModelCall) -> bool:
        """Write the call to the journal; return False if there is none or its disk is full."""
        if self._journal is None:
            return False
        try:
            self._journal.add(call, self._num_submitted + 1)
        except OSError as error:
            _log.error("call %s waits for the store, the journal fails: %s", call.id, error)
            return False
        return True

    def count(self, tally: Tally) -> None:
        """Queue a rollout whose requests are counted from now on; its tally is told if it is not new."""
        with self._wake:
            self._put(tally)
            tally.noted = self.written()

    def _put(self, entry: ModelCall | Tally) -> None:
        self._queue.append(entry)
        self._num_submitted += 1
        if len(self._queue) in (1, _MAX_BATCH):  # else the writer lingers, or is busy
            self._wake.notify_all()

    def written(self) -> Future[None]:
        """Return a future, done once all that was submitted so far is durable, whatever comes meanwhile."""
        future: Future[None] = Future()
        with self._wake:
            if self.backlog == 0:
                future.set_result(None)
            else:
                self._waiting.append((self._num_submitted, future))
                self._wake.notify_all()
        return future

    def flush(self, deadline_seconds: float) -> None:
        """Wait until everything submitted so far is durable."""
        try:
            self.written().result(deadline_seconds)
        except TimeoutError:
            raise self.too_slow(deadline_seconds) from None

    def too_slow(self, deadline_seconds: float) -> DeadlineExceeded:
        """Return the error for a caller that waited this long for the writer."""
        return DeadlineExceeded(
            f"{self.backlog} entries were not written within {deadline_seconds:.0f} s: "
            f"{self._error or 'the store is slow'}",
            hint="retry later; see the gateway's log",
        )

    def close(self, deadline_seconds: float) -> None:
        """Flush, then stop the writer."""
        try:
            self.flush(deadline_seconds)
        finally:
            with self._wake:
                self._closing = True
                self._wake.notify_all()
            self._thread.join(_RETRY_SECONDS + 1)
            if self._journal is not None:
                self._journal.close(everything_is_written=self.backlog == 0)

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                self._write(batch)
            except Exception as error:  # nobody joins this thread: `refusal` must say that it ended, and why
                self._error = f"{type(error).__name__}: {error}; restart the gateway"
                _log.exception("the recorder stopped with %d calls unwritten", self.backlog)
                raise

    def _next_batch(self) -> list[ModelCall | Tally]:
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._closing)
            self._wake.wait_for(
                lambda: self._waiting or self._closing or len(self._queue) >= _MAX_BATCH, _LINGER_SECONDS
            )
            batch, self._queue = self._queue[:_MAX_BATCH], self._queue[_MAX_BATCH:]
            self._writing = len(batch)
            return batch

    def _write(self, batch: list[ModelCall | Tally]) -> None:
        """Write the batch; if an entry of it cannot be written, lose that one alone."""
        known = attempt(lambda: self._append(batch), lambda error: error)
        if isinstance(known, set):
            self._settle(batch, known, num_entries=len(batch))
        elif isinstance(known, _PASSING):  # the recorder closes; the journal keeps the calls
            raise known
        elif len(batch) > 1:
            for entry in batch:
                self._write([entry])
        else:
            self._lose(batch[0], known)

    def _lose(self, entry: ModelCall | Tally, error: Exception) -> None:
        self.num_lost += 1
        if isinstance(entry, ModelCall):
            _log.error("call %s is lost, the store does not take it", entry.id, exc_info=error)
            self._settle([], set(), num_entries=1)
        else:
            _log.error("rollout %s is not counted", entry.rollout_id, exc_info=error)
            self._settle([entry], {entry.rollout_id}, num_entries=1)

    def _append(self, batch: list[ModelCall | Tally]) -> set[str]:
        """Write the batch; wait while the store cannot be written. Return the rollouts that were known."""
        calls = [entry for entry in batch if isinstance(entry, ModelCall)]
        rollouts = [entry.rollout_id for entry in batch if isinstance(entry, Tally)]
        while True:
            try:
                return self._store.append(calls, rollouts)
            except _PASSING as error:
                self._error = f"{type(error).__name__}: {cause_of(error)}".splitlines()[0]
                _log.error("cannot write %d calls, trying again: %s", len(batch), str(error).splitlines()[0])
                if self._closing:
                    raise
                time.sleep(_RETRY_SECONDS)

    def _settle(self, batch: list[ModelCall | Tally], known: set[str], *, num_entries: int) -> None:
        """Count the entries as done and tell those who wait."""
        with self._wake:
            self._error = None
            self.num_recorded += sum(isinstance(entry, ModelCall) for entry in batch)
            self._num_written += num_entries
            self._writing -= num_entries
            for tally in batch:
                if isinstance(tally, Tally):
                    tally.whole = tally.rollout_id not in known
                    known.add(tally.rollout_id)
            if self._journal is not None:
                self._journal.written(self._num_written)
            self._wake.notify_all()
            self._tell_waiting()

    def _tell_waiting(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._num_written:
            _, future = self._waiting.popleft()
            if future.set_running_or_notify_cancel():  # else nobody waits any more
                future.set_result(None)
