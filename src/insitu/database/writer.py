"""Group commit: one thread, one transaction for all operations waiting at that moment.

    callers ──submit──► bounded queue ──► writer thread: BEGIN IMMEDIATE
                (full: Overloaded)            SAVEPOINT op RELEASE, SAVEPOINT op ROLLBACK TO, …
    futures ◄──────── after COMMIT ──────  COMMIT (one fsync for the batch)

A caller gets its outcome only after the commit, errors included: what an operation saw of its neighbours in
the batch does not exist if the commit fails.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar, cast

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from insitu.database.engine import advice, cause_of, unstorable, writing
from insitu.errors import DeadlineExceeded, InsituError, Overloaded, Unavailable, Undecided, attempt

Result = TypeVar("Result")
Operation = Callable[[Connection], object]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pending:
    operation: Operation
    future: Future[object] = field(default_factory=Future[object])


class GroupCommitWriter:
    """Runs write operations in batches; `run` returns when the operation is durable."""

    def __init__(self, engine: Engine, *, max_batch: int = 256, max_waiting: int = 10_000) -> None:
        self._engine = writing(engine)
        self._queue: queue.Queue[_Pending | None] = queue.Queue(maxsize=max_waiting)
        self._max_batch = max_batch
        self._closed = threading.Event()
        # Orders every put against close(): nothing can be queued behind the end marker.
        self._gate = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="ledger-writer", daemon=True)
        self._thread.start()

    def submit(self, operation: Callable[[Connection], Result]) -> Future[Result]:
        """Queue `operation`; the future resolves after the commit that contains it."""
        pending = _Pending(operation)
        with self._gate:
            if self._closed.is_set():
                raise Unavailable("the ledger is closed", hint="the process is shutting down; retry later")
            try:
                self._queue.put_nowait(pending)
            except queue.Full:
                raise Overloaded(
                    f"{self._queue.maxsize} ledger writes are waiting already", hint="retry later"
                ) from None
        return cast("Future[Result]", pending.future)

    def run(self, operation: Callable[[Connection], Result], deadline_seconds: float = 60.0) -> Result:
        """Run `operation` and wait until it is durable."""
        future = self.submit(operation)
        try:
            return future.result(timeout=deadline_seconds)
        except TimeoutError:
            # If it has not begun, it never will. If it has, it may still commit: only a repeat can tell.
            future.cancel()
            raise Undecided(
                f"a ledger write was not durable after {deadline_seconds:.0f} s",
                hint="repeat the same request (same id or key); check the disk of the state directory",
            ) from None

    def close(self, deadline_seconds: float = 30.0) -> None:
        """Finish the queued operations, then stop."""
        with self._gate:
            first = not self._closed.is_set()
            self._closed.set()
        if first:
            try:
                self._queue.put(None, timeout=deadline_seconds)
            except queue.Full:
                raise DeadlineExceeded(
                    f"the ledger writer took nothing from its queue for {deadline_seconds:.0f} s"
                ) from None
        self._thread.join(deadline_seconds)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the ledger writer did not stop within {deadline_seconds:.0f} s")

    def _loop(self) -> None:
        ended = False
        while not ended:
            first = self._queue.get()
            if first is None:
                return
            batch = [first]
            while len(batch) < self._max_batch:
                try:
                    following = self._queue.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    ended = True
                    break
                batch.append(following)
            self._commit([pending for pending in batch if pending.future.set_running_or_notify_cancel()])

    def _commit(self, batch: list[_Pending]) -> None:
        if not batch:
            return
        outcomes: list[tuple[object, BaseException | None]] = []
        try:
            with self._engine.begin() as connection:
                outcomes.extend(_in_savepoint(connection, pending.operation) for pending in batch)
        except Exception as error:  # every waiting caller gets it, and the thread must live on for the next
            log.exception("ledger transaction of %d operations failed", len(batch))
            failure = _as_unavailable(error, advice(self._engine))
            for pending in batch:
                pending.future.set_exception(failure)
            return
        for pending, (value, error) in zip(batch, outcomes, strict=True):
            if error is None:
                pending.future.set_result(value)
            else:
                pending.future.set_exception(error)


def _in_savepoint(connection: Connection, operation: Operation) -> tuple[object, BaseException | None]:
    """Run one operation; an error of its own is returned for its caller and leaves the others untouched."""
    savepoint = connection.begin_nested()

    def run() -> tuple[object, Exception | None]:
        value = operation(connection)
        savepoint.commit()
        return value, None

    value, error = attempt(run, lambda error: (None, error))
    if isinstance(error, DBAPIError) and not isinstance(error, IntegrityError | DataError):
        # Disk full, I/O error or a lost server: the whole transaction may have ended already.
        raise error
    if error is not None:
        savepoint.rollback()
    return value, unstorable(error) if isinstance(error, DataError) else error


def _as_unavailable(error: Exception, hint: str) -> Exception:
    if isinstance(error, InsituError) or not isinstance(error, DBAPIError):
        return error
    failure = Unavailable(f"the ledger cannot write: {cause_of(error)}", hint=hint)
    failure.__cause__ = error
    return failure
