"""TrajectoryStore: every rollout of one epoch or validation, complete, in one file.

    finished rollout ─► append: one write, survives kill -9
    finished group   ─► sync: survives a power cut
    next start       ─► entries(): everything but outputs and calls, which stay on the disk

A rollout may be written more than once (when it has run, when it is scored); its last line counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from insitu.errors import InvalidRequest, NotFound
from insitu.harness.files.json_lines import DamagedFile, JsonLines, Span, encode, read_only, read_record
from insitu.harness.rollouts.episode import Call, Trajectory
from insitu.harness.rollouts.step_rewards import trained_step_rewards
from insitu.types import Ending
from insitu.wire.listed_calls import expand


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored rollout without its output and its calls."""

    rollout_id: str
    example_id: str
    index: int
    """The position of the example in the dataset."""
    generation: int
    attempt: int
    ending: Ending
    reward: float | None
    reason: str
    call_ids: tuple[str, ...]
    step_rewards: tuple[float, ...] | None
    """One per call id, see `insitu.harness.rollouts.step_rewards`."""
    expected: Any
    metadata: Mapping[str, Any]
    seconds: float | None
    started_at: float | None
    span: Span = field(repr=False)
    """Position of the complete record in the file."""


class TrajectoryStore:
    """Open for reading and appending, by one process. Reading still works after `close`."""

    def __init__(self, path: Path) -> None:
        """Index the file or create it; discard a record that a crash cut off."""
        self._lines = JsonLines(path)
        self._entries: dict[str, Entry] = {}
        self._groups: dict[int, dict[str, None]] = {}
        try:
            for span, record in self._lines.scan():
                self._index(span, record)
        except BaseException:
            self._lines.close()
            raise

    @property
    def path(self) -> Path:
        """The file."""
        return self._lines.path

    @property
    def torn_bytes(self) -> int:
        """Size of the unfinished record discarded when the store was opened."""
        return self._lines.torn_bytes

    @property
    def closed(self) -> bool:
        """True once nothing more can be appended."""
        return self._lines.closed

    def append(self, record: Mapping[str, Any]) -> Entry:
        """Write one rollout; reject NaN and infinite numbers."""
        _check(record)
        return self._index(self._lines.append(encode(record)), record)

    def sync(self) -> None:
        """Flush everything to disk."""
        self._lines.sync()

    def entries(self) -> list[Entry]:
        """Return one entry per rollout, in the order first seen."""
        return list(self._entries.values())

    def group(self, index: int) -> list[Entry]:
        """Return the rollouts of the example at that position, in the order first seen."""
        return [self._entries[rollout_id] for rollout_id in self._groups.get(index, ())]

    def read(self, rollout_id: str) -> dict[str, Any]:
        """Read the complete record of a rollout."""
        entry = self._entries.get(rollout_id)
        if entry is None:
            raise NotFound(f"rollout {rollout_id} is not in {self.path}")
        return _read(self.path, entry)

    def trajectory(self, entry: Entry) -> Trajectory:
        """Return the rollout for training; its calls are read from the file on demand."""
        return Trajectory(
            rollout_id=entry.rollout_id,
            example_id=entry.example_id,
            generation=entry.generation,
            ending=entry.ending,
            reward=entry.reward,
            reason=entry.reason,
            call_ids=entry.call_ids,
            step_rewards=entry.step_rewards,
            metadata=entry.metadata,
            read_calls=partial(_read_calls, self.path, entry),
        )

    def close(self) -> None:
        """Sync and close; idempotent."""
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _index(self, span: Span, record: Mapping[str, Any]) -> Entry:
        try:
            entry = _entry(span, record)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFile(
                f"{self.path} has no valid rollout at byte {span.offset}: {type(error).__name__}: {error}",
                hint="restore the file from a copy, or start anew in another finetuning.output_dir",
            ) from error
        self._entries[entry.rollout_id] = entry
        self._groups.setdefault(entry.index, {})[entry.rollout_id] = None
        return entry


def read_entries(path: Path) -> list[Entry]:
    """Read the rollouts in a file that a run may still be writing; never modify it."""
    entries: dict[str, Entry] = {}
    for span, record in read_only(path):
        try:
            entry = _entry(span, record)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFile(f"{path} has no valid rollout at byte {span.offset}: {error}") from error
        entries[entry.rollout_id] = entry
    return list(entries.values())


def read_whole(path: Path, entry: Entry) -> dict[str, Any]:
    """Read the complete record of an entry, with every call expanded."""
    record = _read(path, entry)
    return record | {"calls": expand(record.get("calls") or ())}


def _check(record: Mapping[str, Any]) -> None:
    """Reject a record that could not be read back, before it is on disk."""
    try:
        _entry(Span(0, 0), record)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"this is no record of a rollout: {type(error).__name__}: {error}") from error


def _entry(span: Span, record: Mapping[str, Any]) -> Entry:
    reward = record.get("reward")
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}")
    return Entry(
        rollout_id=str(record["rollout_id"]),
        example_id=str(record["example_id"]),
        index=int(record["index"]),
        generation=int(record["generation"]),
        attempt=int(record.get("attempt", 0)),
        ending=Ending(record["ending"]),
        reward=None if reward is None else float(reward),
        reason=str(record.get("reason") or ""),
        call_ids=tuple(record.get("call_ids") or ()),
        step_rewards=trained_step_rewards(record),
        expected=record.get("expected"),
        metadata=dict(record.get("metadata") or {}),
        seconds=record.get("seconds"),
        started_at=record.get("started_at"),
        span=span,
    )


def _read(path: Path, entry: Entry) -> dict[str, Any]:
    record = read_record(path, entry.span)
    if record.get("rollout_id") != entry.rollout_id:
        raise DamagedFile(
            f"{path} has another rollout than {entry.rollout_id} at byte {entry.span.offset}",
            hint="another program changed the file; start anew in another finetuning.output_dir",
        )
    return record


def _read_calls(path: Path, entry: Entry) -> Sequence[Call]:
    return expand(_read(path, entry).get("calls") or ())
