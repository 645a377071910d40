"""StoredRollout: one rollout of the index with its details from the run's own files."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import LiteralString

import orjson

from insitu.errors import NotFound, Unavailable
from insitu.harness.files.json_lines import DamagedFile, Span, read_record
from insitu.harness.files.rollout_line import from_line, tokens_of
from insitu.harness.files.rollout_store import Stored
from insitu.harness.files.run_directory import TRAJECTORIES
from insitu.harness.files.trained_tokens import TrainedCall
from insitu.harness.rollouts.rollout import Rollout, RolloutDetails
from insitu.types import StepSettings
from insitu.view.reading.entry import member_of
from insitu.view.reading.fates import Judged, Member, judge
from insitu.view.reading.query import ROLLOUTS, row_of
from insitu.view.reading.run_files import RunFiles
from insitu.view.reading.statement import ask
from insitu.view.run import ViewedRun
from insitu.wire.views.rollouts import RolloutRow


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """A row of the index, and the rollout it stands for."""

    row: RolloutRow
    rollout: Rollout

    def details(self) -> tuple[RolloutDetails, str]:
        """Return the details, and why their tokens cannot be read; empty if they can."""
        try:
            return self.rollout.details(tokens=True), ""
        except DamagedFile as error:
            return self.rollout.details(), error.message


def find_rollout(run: ViewedRun, rollout_id: str) -> StoredRollout:
    """Return a rollout by its id; raises NotFound."""
    found = find_rollouts(
        run, "r.rollout_id = ? ORDER BY s.kind = 'set_aside', r.id DESC LIMIT 1", [rollout_id]
    )
    if not found:
        raise NotFound(
            f"{run.path} has no rollout {rollout_id!r}", hint=f"GET /view/v1/runs/{run.key}/rollouts"
        )
    return found[0]


def find_rollouts(run: ViewedRun, condition: LiteralString, values: Sequence[object]) -> list[StoredRollout]:
    """Return the rollouts that an SQL condition selects."""
    sql = ROLLOUTS.replace(", r.id FROM", ", r.line_offset, r.line_length FROM")
    rows = run.index.read(lambda db: ask(db, f"{sql} WHERE {condition}", values).fetchall())
    return [_load(run, row_of(row), Span(row[-2], row[-1])) for row in rows]


@dataclass(frozen=True, slots=True)
class GroupOfStep:
    """A group of a training step, as far as its fates depend on it."""

    members: Sequence[Member]
    dropped: Mapping[str, str]
    """Why the harness dropped rollouts of the step, by id."""
    step_before: int | None
    """The step of the weights before the update; None if nothing was trained."""

    def judged(self, settings: StepSettings | None) -> dict[str, Judged]:
        """Return the fates of its rollouts, with the advantage of every call."""
        judged = judge(self.members, self.dropped, settings, self.step_before)
        return {member.rollout_id: each for member, each in zip(self.members, judged, strict=True)}


def group_of_step(run: ViewedRun, store: str, index: int) -> GroupOfStep | None:
    """Return a group of a training step; None before selection, and for other rollouts."""
    rows = run.index.read(lambda db: _group_rows(db, store, index))
    selected = run.with_files(lambda files: _selection(files, store))
    if selected is None or not rows or rows[0][2] != "training":
        return None
    dropped, steps = selected
    step = steps.get((rows[0][0], rows[0][1]))
    return GroupOfStep([member_of(row[3]) for row in rows], dropped, None if step is None else step - 1)


def judged_group(run: ViewedRun, store: str, index: int) -> dict[str, Judged]:
    """Return the fates of a group's rollouts, with the advantage of every call; none before selection."""
    group = group_of_step(run, store, index)
    return {} if group is None else group.judged(run.files.settings)


def trained_calls(run: ViewedRun, store: str, index: int) -> Mapping[str, TrainedCall]:
    """Return the trainer's own figures of the calls of a group's step; none if it keeps none."""
    rows = run.index.read(lambda db: _group_rows(db, store, index))
    selected = run.with_files(lambda files: _selection(files, store))
    step = None if selected is None or not rows else selected[1].get((rows[0][0], rows[0][1]))
    return {} if step is None else run.trained_calls(step)


def _group_rows(db: sqlite3.Connection, store: str, index: int) -> list[tuple[int, int, str, str]]:
    return db.execute(
        "SELECT s.epoch, s.step_of_epoch, s.kind, r.member FROM rollouts r JOIN stores s ON s.id = r.store "
        "WHERE s.name = ? AND r.position = ? ORDER BY r.generation, r.id",
        (store, index),
    ).fetchall()


def _selection(
    files: RunFiles, store: str
) -> tuple[Mapping[str, str], Mapping[tuple[int, int], int | None]] | None:
    dropped = files.dropped(store)
    if dropped is None:
        return None
    return dropped, {
        (line["epoch"], line.get("step_of_epoch", 0)): line.get("step") for line in files.steps()
    }


def _load(run: ViewedRun, row: RolloutRow, span: Span) -> StoredRollout:
    path = run.path / TRAJECTORIES / f"{row.store}.jsonl"
    try:
        line = read_record(path, span)
        if line.get("rollout_id") != row.rollout_id:
            raise DamagedFile(f"{path} has another rollout at byte {span.offset}")
    except (DamagedFile, FileNotFoundError, orjson.JSONDecodeError) as error:
        # The run has set the file aside since it was indexed; the index notices within seconds.
        raise Unavailable(f"{path} has just changed", hint="reload the page") from error
    return StoredRollout(row, from_line(line, Stored(path, row.rollout_id, span, tokens_of(line))))
