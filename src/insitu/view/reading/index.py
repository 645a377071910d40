"""RunIndex: the rollouts of a run in SQLite, filled from the files as they grow.

    trajectories/*.jsonl ──► new complete lines ──► rollouts, words      the last line of a rollout counts
    left_out/*.json      ──► fates and advantages of a step's rollouts   once its selection is known

`refresh` does a bounded amount of work and commits it, so that a page shows what there is so far. The files
decide: a file that was replaced or renamed is read from its start, and the rows of a missing one are deleted.
Several processes may use one index: each refresh is a transaction that begins with what is in the table.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from insitu.errors import DeadlineExceeded
from insitu.harness.files.run_directory import TRAJECTORIES
from insitu.view.reading.entry import ENTRY_COLUMNS, entry_of, member_of
from insitu.view.reading.fates import judge
from insitu.view.reading.run_files import RunFiles, signature_of
from insitu.view.reading.schema import connect, connect_to_read, index_path, unusable
from insitu.view.reading.store_name import StoreName
from insitu.view.reading.tail import Place, lines_after, start_of, still_there

_INVALID = (KeyError, TypeError, ValueError)
_LINES_AT_ONCE = 500
_READ_SECONDS = 5.0
_INSTRUCTIONS_AT_ONCE = 10_000
"""Between two looks at the clock."""
_FIRST_FATE = {"training": "waiting", "validation": "validation", "remeasured": "validation"}
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of the index."""

    version: int
    """Grows with every change."""
    num_rollouts: int
    share: float
    """Of the files' bytes that are in the index."""


class _Budget:
    """Time for some work, of which at least one piece is done."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._begun = False

    def take(self) -> bool:
        """Return True if another piece may be done."""
        begun, self._begun = self._begun, True
        return not begun or time.monotonic() < self._end


class RunIndex:
    """The index of one run; its methods may be called from several threads."""

    def __init__(self, files: RunFiles, path: Path | None = None) -> None:
        self.path = path or index_path(files.path)
        self._files = files
        self._db = connect(self.path)
        self._lock = threading.Lock()
        """Of the writer; readers have connections of their own, and never wait for it."""
        self._readers = threading.local()
        self._opened: list[sqlite3.Connection] = []
        self._version = 0
        self._share = 0.0

    def close(self) -> None:
        """Close the file. No thread may read any more."""
        with self._lock:
            for connection in (*self._opened, self._db):
                connection.close()
            self._opened.clear()

    def read(self, ask: Callable[[sqlite3.Connection], Value]) -> Value:
        """Call `ask` with a connection of this thread; it must only read."""
        connection: sqlite3.Connection | None = getattr(self._readers, "connection", None)
        if connection is None:
            connection = self._readers.connection = connect_to_read(self.path)
            self._opened.append(connection)
        deadline = time.monotonic() + _READ_SECONDS
        connection.set_progress_handler(lambda: time.monotonic() > deadline, _INSTRUCTIONS_AT_ONCE)
        try:
            return ask(connection)
        except sqlite3.OperationalError as error:
            if "interrupted" not in str(error):
                raise
            raise DeadlineExceeded(
                f"the index did not answer within {_READ_SECONDS:.0f} s", hint="narrow the filters"
            ) from error

    def progress(self) -> Progress:
        """Return how far the index is."""
        (count,) = self.read(lambda db: db.execute("SELECT count(*) FROM rollouts").fetchone())
        return Progress(self._version, count, self._share)

    def problems(self) -> list[str]:
        """Say which files have lines that are not rollouts."""
        rows = self.read(
            lambda db: db.execute("SELECT name, num_broken FROM stores WHERE num_broken").fetchall()
        )
        where = self._files.path / TRAJECTORIES
        return [f"{where / name}.jsonl: {count} lines are not rollouts" for name, count in rows]

    def refresh(self, budget_seconds: float = 1.0) -> bool:
        """Read what is new, for about `budget_seconds`; return True if nothing is left to read.

        Some lines are read however small the budget is.
        """
        with self._lock:
            try:
                done, changed = self._read_new(_Budget(budget_seconds))
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                    raise unusable(self.path, error) from error
                done, changed = False, True  # another process fills the index
            self._share = self._measure(self._files.stores())
            self._version += changed
        return done

    def _read_new(self, budget: _Budget) -> tuple[bool, bool]:
        """Return whether nothing is left to read, and whether anything changed."""
        files = self._files.stores()
        changed = self._forget(files)
        done = True
        whole: set[str] = set()
        # The newest first: that is what people look at while the rest is read.
        for name, path in sorted(files.items(), key=_changed_at, reverse=True):
            more, grew = self._read_store(name, path, budget)
            changed |= grew
            if more:
                done = False
                break
            whole.add(name)
        return done, changed | self._judge(whole)

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:  # also when interrupted: a transaction must not stay open
            if self._db.in_transaction:  # a full disk has ended it
                self._db.execute("ROLLBACK")
            raise

    def _forget(self, files: dict[str, Path]) -> bool:
        """Delete the rows of files that are gone or were replaced."""
        rows = self._db.execute("SELECT id, name, inode, head, offset FROM stores").fetchall()
        gone = [
            store
            for store, name, inode, head, offset in rows
            if name not in files or not still_there(files[name], Place(inode, head, offset))
        ]
        for store in gone:
            with self._transaction() as db:
                db.execute(
                    "DELETE FROM words WHERE id IN (SELECT id FROM rollouts WHERE store = ?)", (store,)
                )
                db.execute("DELETE FROM rollouts WHERE store = ?", (store,))
                db.execute("DELETE FROM stores WHERE id = ?", (store,))
        return bool(gone)

    def _read_store(self, name: str, path: Path, budget: _Budget) -> tuple[bool, bool]:
        """Read new lines; return whether some are left, and whether there were any."""
        grew = False
        while True:
            known = self._db.execute("SELECT offset FROM stores WHERE name = ?", (name,)).fetchone()
            if known is not None and path.stat().st_size <= known[0]:
                return False, grew
            if not budget.take():
                return True, grew
            with self._transaction():
                num_lines = self._read_lines(name, path)
            grew = grew or num_lines > 0
            if num_lines < _LINES_AT_ONCE:
                return False, grew

    def _read_lines(self, name: str, path: Path) -> int:
        known = self._db.execute(
            "SELECT id, seq, offset, kind FROM stores WHERE name = ?", (name,)
        ).fetchone()
        lines = lines_after(path, 0 if known is None else known[2])
        new = [line for line, _ in zip(lines, range(_LINES_AT_ONCE), strict=False)]
        if not new:
            return 0
        if known is None:
            known = self._add_store(name, path, new[0].record)
        store, seq, _, kind = known
        broken = 0
        for line in new:
            try:
                if line.record is None:
                    raise ValueError("not a JSON object")
                self._put(store, seq, _FIRST_FATE.get(kind, "set_aside"), *entry_of(line.record, line.span))
            except _INVALID:
                broken += 1
        end = new[-1].span
        self._db.execute(
            "UPDATE stores SET offset = ?, num_broken = num_broken + ?, judged = '' WHERE id = ?",
            (end.offset + end.length, broken, store),
        )
        return len(new)

    def _add_store(self, name: str, path: Path, first: object) -> tuple[int, int, int, str]:
        """Files are in the order in which their first rollouts began."""
        of, place = StoreName.of(name), start_of(path)
        begun = first.get("started_at") if isinstance(first, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        began = begun if isinstance(begun, int | float) else path.stat().st_mtime
        seq = int(began * 1000)
        cursor = self._db.execute(
            "INSERT INTO stores (name, kind, epoch, step_of_epoch, seq, inode, head, offset) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, 0)",
            (name, of.kind, of.epoch, of.step_of_epoch, seq, place.inode, place.head),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid, seq, 0, of.kind

    def _put(self, store: int, seq: int, fate: str, entry: object, words: str) -> None:
        values = [getattr(entry, name) for name in ENTRY_COLUMNS]
        cursor = self._db.execute(_PUT, [store, seq, fate, *values])
        (row,) = cursor.fetchone()
        self._db.execute("INSERT OR REPLACE INTO words (id, words) VALUES (?, ?)", (row, words))

    def _judge(self, whole: set[str]) -> bool:
        """Set the fates of the rollouts of steps that are read and whose selection is known and new."""
        steps = {
            (line["epoch"], line.get("step_of_epoch", 0)): line.get("step") for line in self._files.steps()
        }
        changed = False
        rows = self._db.execute(
            "SELECT id, name, epoch, step_of_epoch, judged FROM stores WHERE kind = 'training'"
        ).fetchall()
        for store, name, epoch, step_of_epoch, judged in rows:
            selected = signature_of(self._files.dropped_file(name))
            if selected is None or name not in whole:
                continue
            step = steps.get((epoch, step_of_epoch))
            if (signature := f"{selected} {step}") != judged:
                self._judge_store(store, name, step, signature)
                changed = True
        return changed

    def _judge_store(self, store: int, name: str, step: int | None, signature: str) -> None:
        dropped = self._files.dropped(name) or {}
        before = None if step is None else step - 1
        rows: Sequence[tuple[int, int, str]] = self._db.execute(
            "SELECT id, position, member FROM rollouts WHERE store = ? ORDER BY position, generation",
            (store,),
        ).fetchall()
        groups: dict[int, list[tuple[int, str]]] = {}
        for row, position, member in rows:
            groups.setdefault(position, []).append((row, member))
        with self._transaction() as db:
            for group in groups.values():
                judged = judge([member_of(m) for _, m in group], dropped, self._files.settings, before)
                db.executemany(
                    "UPDATE rollouts SET fate = ?, reason = ?, advantage = ? WHERE id = ?",
                    [
                        (each.fate, each.reason, each.advantage, row)
                        for (row, _), each in zip(group, judged, strict=True)
                    ],
                )
            db.execute("UPDATE stores SET judged = ? WHERE id = ?", (signature, store))

    def _measure(self, files: dict[str, Path]) -> float:
        total = sum(path.stat().st_size for path in files.values() if path.exists())
        (known,) = self._db.execute("SELECT coalesce(sum(offset), 0) FROM stores").fetchone()
        return min(1.0, known / total) if total else 1.0


def _changed_at(file: tuple[str, Path]) -> float:
    return file[1].stat().st_mtime


_COLUMNS = ", ".join(ENTRY_COLUMNS)
_PUT = (
    f"INSERT INTO rollouts (store, seq, fate, {_COLUMNS}) "  # noqa: S608 - names of this module
    f"VALUES ({', '.join('?' * (len(ENTRY_COLUMNS) + 3))}) ON CONFLICT (store, rollout_id) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in ENTRY_COLUMNS)
    + ", fate = excluded.fate, reason = NULL, advantage = NULL RETURNING id"
)
