"""The recorder: a bounded queue and one writer thread that commits calls in groups, off the hot path.

    handlers ── submit ──► queue ──► writer thread ── append(batch) ──► RecordStore (durable)
             └─ count ──┘

Whatever arrived during one commit forms the next batch, so the batch grows with the load by itself. When
the store cannot be written (disk full), the batch is kept and retried; meanwhile `refusal` gives the
reason, and the gateway takes no new calls.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future

from sqlalchemy.exc import SQLAlchemyError

from insitu.errors import DeadlineExceeded, InsituError
from insitu.gateway.recording.tally import Tally
from insitu.records.store import RecordStore
from insitu.types import ModelCall

_log = logging.getLogger(__name__)
_MAX_BATCH = 256
_RETRY_SECONDS = 1.0


class Recorder:
    """Writes submitted calls to a store in the background."""

    def __init__(self, store: RecordStore, *, max_backlog: int) -> None:
        self.num_recorded = 0
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

    def submit(self, call: ModelCall) -> None:
        """Queue a finished call. Never rejects one: `refusal` is checked before a call starts."""
        with self._wake:
            if self._closing:
                raise InsituError(
                    f"Call {call.id} finished after the recorder was closed; it is not recorded."
                )
            self._put(call)

    def count(self, tally: Tally) -> None:
        """Queue a rollout whose requests are counted from now on; its tally is told if it is not new."""
        with self._wake:
            self._put(tally)

    def _put(self, entry: ModelCall | Tally) -> None:
        self._queue.append(entry)
        self._num_submitted += 1
        self._wake.notify_all()

    def written(self) -> Future[None]:
        """Return a future, done once all that was submitted so far is durable, whatever comes meanwhile."""
        future: Future[None] = Future()
        with self._wake:
            if self.backlog == 0:
                future.set_result(None)
            else:
                self._waiting.append((self._num_submitted, future))
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
            batch, self._queue = self._queue[:_MAX_BATCH], self._queue[_MAX_BATCH:]
            self._writing = len(batch)
            return batch

    def _write(self, batch: list[ModelCall | Tally]) -> None:
        calls = [entry for entry in batch if isinstance(entry, ModelCall)]
        tallies = [entry for entry in batch if isinstance(entry, Tally)]
        while True:
            try:
                known = self._store.append(calls, [tally.rollout_id for tally in tallies])
            except (SQLAlchemyError, OSError) as error:
                self._error = f"{type(error).__name__}: {error}".splitlines()[0]
                _log.error("cannot write %d calls, trying again: %s", len(batch), self._error)
                if self._closing:
                    raise
                time.sleep(_RETRY_SECONDS)
                continue
            with self._wake:
                self._error = None
                self.num_recorded += len(calls)
                self._num_written += len(batch)
                self._writing = 0
                for tally in tallies:
                    tally.whole = tally.rollout_id not in known
                    known.add(tally.rollout_id)
                self._wake.notify_all()
                self._tell_waiting()
            return

    def _tell_waiting(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._num_written:
            _, future = self._waiting.popleft()
            if future.set_running_or_notify_cancel():  # else nobody waits any more
                future.set_result(None)
