"""RolloutStore: every rollout of one epoch or validation, complete, in two files.

    finished rollout ─► append: its tokens to one file, then all else as a line of the other; survives kill -9
    finished group   ─► sync: survives a power cut
    next start       ─► rollouts(): light; details stay on the disk, and no token is read

A rollout may be written more than once (when it has run, when it is scored); its last line counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from insitu.errors import InsituError, InvalidRequest
from insitu.harness.files.json_lines import DamagedFile, JsonLines, Span, encode, read_only, read_record
from insitu.harness.files.rollout_line import details_of, from_line, to_line, tokens_of
from insitu.harness.files.token_file import TokenFile, TokenSpan, read_tokens, split_tokens, tokens_beside
from insitu.harness.rollouts.rollout import InMemory, Rollout, RolloutDetails
from insitu.system.durable import Closing, sync_path

_INVALID = (KeyError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Stored:
    """The place of a rollout's details in the files of a store."""

    path: Path
    rollout_id: str
    span: Span
    tokens: TokenSpan | None
    """None if they are in the line itself, or there are none."""

    def read(self, *, tokens: bool) -> RolloutDetails:
        """Read the line, and the tokens if asked for."""
        line = read_record(self.path, self.span)
        if line.get("rollout_id") != self.rollout_id:
            raise DamagedFile(
                f"{self.path} has another rollout than {self.rollout_id} at byte {self.span.offset}",
                hint="another program changed the file; start over in another finetuning.output_dir",
            )
        details = details_of(line)
        if not tokens or self.tokens is None:
            return details
        return replace(details, calls=read_tokens(tokens_beside(self.path), self.tokens, details.calls))


class RolloutStore(Closing):
    """Open for reading and appending, by one process. Reading still works after `close`."""

    def __init__(self, path: Path, on_stored: Callable[[Rollout], None] | None = None) -> None:
        """Index the file or create it; discard a rollout that a crash cut off.

        `on_stored` gets each rollout once it is written.
        """
        self._lines = JsonLines(path)
        self._on_stored = on_stored
        self._rollouts: dict[str, Rollout] = {}
        self._groups: dict[int, dict[str, None]] = {}
        end = 0
        with ExitStack() as opening:
            opening.callback(self._lines.close)
            for span, line in self._lines.scan():
                rollout = _read(path, span, line)
                self._index(rollout)
                end = max(end, _end_of_tokens(rollout))
            self._tokens = TokenFile(tokens_beside(path), end)
            opening.pop_all()

    @property
    def path(self) -> Path:
        """The file of the lines."""
        return self._lines.path

    @property
    def torn_bytes(self) -> int:
        """Size of the unfinished line discarded when the store was opened."""
        return self._lines.torn_bytes

    @property
    def missing_token_bytes(self) -> int:
        """Size of the tokens that lines name and the token file no longer has."""
        return self._tokens.missing_bytes

    @property
    def closed(self) -> bool:
        """True once nothing more can be appended."""
        return self._lines.closed

    def append(self, rollout: Rollout) -> Rollout:
        """Write one rollout and return it with its details on the disk; reject NaN and infinite numbers."""
        if self.closed:
            raise InsituError(f"{self.path} is closed")
        details = rollout.details(tokens=True)
        block, calls = split_tokens(details.calls)
        tokens = self._place(rollout, block)
        line = to_line(rollout, replace(details, calls=calls), tokens)
        _check(line)
        data = encode(line)
        if tokens is not None and tokens.offset == self._tokens.end:
            self._tokens.write(tokens, block)
        stored = _read(self.path, self._lines.append(data), line)
        self._index(stored)
        if self._on_stored is not None:
            self._on_stored(stored)
        return stored

    def sync(self) -> None:
        """Flush everything to disk, tokens first."""
        self._tokens.sync()
        self._lines.sync()

    def rollouts(self) -> list[Rollout]:
        """Return every rollout, in the order first seen."""
        return list(self._rollouts.values())

    def group(self, index: int) -> list[Rollout]:
        """Return the rollouts of the example at that position, in the order first seen."""
        return [self._rollouts[rollout_id] for rollout_id in self._groups.get(index, ())]

    def close(self) -> None:
        """Sync and close; idempotent."""
        self._tokens.close()
        self._lines.close()

    def _place(self, rollout: Rollout, block: bytes) -> TokenSpan | None:
        """Return where the block goes, or where it already is: scoring does not change tokens."""
        if not block:
            return None
        new, known = self._tokens.place(block), self._rollouts.get(rollout.rollout_id)
        before = _place_of(known) if known is not None else None
        same = before is not None and (before.length, before.crc32) == (new.length, new.crc32)
        return before if same else new

    def _index(self, rollout: Rollout) -> None:
        self._rollouts[rollout.rollout_id] = rollout
        self._groups.setdefault(rollout.index, {})[rollout.rollout_id] = None


def read_rollouts(path: Path) -> list[Rollout]:
    """Read the rollouts in a file that a run may still be writing; never modify it."""
    rollouts = [_read(path, span, line) for span, line in read_only(path)]
    return list({rollout.rollout_id: rollout for rollout in rollouts}.values())


def _read(path: Path, span: Span, line: Mapping[str, object]) -> Rollout:
    try:
        source = Stored(path, str(line["rollout_id"]), span, tokens_of(line))
        return from_line(line, source)
    except _INVALID as error:
        raise DamagedFile(
            f"{path} has no valid rollout at byte {span.offset}: {type(error).__name__}: {error}",
            hint="restore the file from a copy, or start over in another finetuning.output_dir",
        ) from error


def _check(line: Mapping[str, object]) -> None:
    """Reject a rollout that could not be read back, before it is on disk."""
    try:
        from_line(line, InMemory())
        details_of(line)
    except _INVALID as error:
        raise InvalidRequest(f"this record is not a rollout: {type(error).__name__}: {error}") from error


def _place_of(rollout: Rollout) -> TokenSpan | None:
    return rollout.source.tokens if isinstance(rollout.source, Stored) else None


def _end_of_tokens(rollout: Rollout) -> int:
    tokens = _place_of(rollout)
    return 0 if tokens is None else tokens.end


def remove_rollouts(path: Path) -> None:
    """Remove a file of rollouts and its tokens, if they are there."""
    # Lines first: tokens without lines are cut off when the store is opened again.
    path.unlink(missing_ok=True)
    tokens_beside(path).unlink(missing_ok=True)


def free_name(folder: Path, name: str, why: str) -> Path:
    """Return a path in `folder` for rollouts that are set aside; no file has it yet."""
    number = 1
    while (aside := folder / f"{name}-{why}-{number}.jsonl").exists():
        number += 1
    return aside


def move_rollouts(path: Path, aside: Path) -> None:
    """Move a file of rollouts and its tokens, durably."""
    if (tokens := tokens_beside(path)).exists():
        # First: lines without their tokens can be set aside again, tokens without lines would be cut off.
        tokens.rename(tokens_beside(aside))
    path.rename(aside)
    sync_path(aside.parent)
