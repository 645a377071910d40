"""Operations on trajectory groups. A group is durable once `put` is committed."""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import orjson
from sqlalchemy import Connection, RowMapping, bindparam, insert, select, update

from insitu.backend.ledger import schema
from insitu.backend.ledger.rows import GroupRecord
from insitu.backend.ledger.runs import read_run, refuse_states
from insitu.backend.ledger.transitions import GROUP_TRANSITIONS, check_transition
from insitu.errors import Conflict, NotFound
from insitu.types import Ending, GroupState, RunState, Trajectory, TrajectoryGroup

# Below SQLite's limit on variables per statement in every build.
_CHUNK = 500
_SHOWN = 20

# Built once: building a statement takes several times as long as SQLite's run of it, and `put` is hot.
_FIND_HASH = select(schema.groups.c.body_hash).where(
    schema.groups.c.run == bindparam("run"), schema.groups.c.id == bindparam("id")
)
_FIND_RUN_STATE = select(schema.runs.c.state).where(schema.runs.c.name == bindparam("run"))
_FIND_ROLLOUTS = select(schema.rollouts.c.rollout_id, schema.rollouts.c.group_id).where(
    schema.rollouts.c.run == bindparam("run"),
    schema.rollouts.c.rollout_id.in_(bindparam("rollout_ids", expanding=True)),
)
_INSERT_GROUP = insert(schema.groups)
_INSERT_ROLLOUTS = insert(schema.rollouts)


def to_record(row: RowMapping) -> GroupRecord:
    """Convert a row to a GroupRecord."""
    trajectories = [
        replace(Trajectory(**fields), ending=Ending(fields["ending"]))
        for fields in orjson.loads(zlib.decompress(row["trajectories"]))
    ]
    return GroupRecord(
        group=TrajectoryGroup(id=row["id"], run=row["run"], trajectories=trajectories),
        body_hash=row["body_hash"],
        state=GroupState(row["state"]),
        job_id=row["job_id"],
        step=row["step"],
        created_at=row["created_at"],
    )


def is_stored(connection: Connection, group: TrajectoryGroup, body_hash: str) -> bool:
    """Return True if the same group is already stored; raise Conflict if it cannot be."""
    found = connection.execute(_FIND_HASH, {"run": group.run, "id": group.id}).scalar()
    if found is not None:
        if found == body_hash:
            return True
        raise Conflict(
            f"group {group.id!r} of run {group.run!r} was already received with a different body",
            hint="upload the new body under a new id",
        )
    state = connection.execute(_FIND_RUN_STATE, {"run": group.run}).scalar()
    if state in (None, RunState.CLOSED, RunState.DAMAGED):
        refuse_states(read_run(connection, group.run), RunState.CLOSED)
    _refuse_known_rollouts(connection, group)
    return False


def put(connection: Connection, group: TrajectoryGroup, body_hash: str, packed: bytes) -> bool:
    """Store the group; return False if the same one is already stored."""
    if is_stored(connection, group, body_hash):
        return False
    row = {
        "run": group.run,
        "id": group.id,
        "body_hash": body_hash,
        "state": GroupState.RECEIVED,
        "trajectories": packed,
        "created_at": time.time(),
    }
    connection.execute(_INSERT_GROUP, row)
    rows = [
        {"run": group.run, "rollout_id": trajectory.rollout_id, "group_id": group.id}
        for trajectory in group.trajectories
    ]
    if rows:
        connection.execute(_INSERT_ROLLOUTS, rows)
    return True


def pack(group: TrajectoryGroup) -> bytes:
    """Serialise and compress the trajectories; done outside the writer thread, which all writers share."""
    return zlib.compress(orjson.dumps(group.trajectories), 1)


def _refuse_known_rollouts(connection: Connection, group: TrajectoryGroup) -> None:
    ids = [trajectory.rollout_id for trajectory in group.trajectories]
    if len(set(ids)) != len(ids):
        twice = sorted(rollout for rollout, times in Counter(ids).items() if times > 1)
        raise Conflict(
            f"group {group.id!r} holds rollouts twice: {', '.join(twice[:_SHOWN])}",
            hint="give each rollout its own id",
        )
    for part in _chunks(ids):
        row = connection.execute(_FIND_ROLLOUTS, {"run": group.run, "rollout_ids": list(part)}).first()
        if row is not None:
            raise Conflict(
                f"rollout {row[0]!r} of run {group.run!r} is already in group {row[1]!r}",
                hint="a rollout is trained once: give each rollout its own id",
            )


def read(connection: Connection, run: str, group_id: str) -> GroupRecord:
    """Return the group, or raise NotFound."""
    query = select(schema.groups).where(schema.groups.c.run == run, schema.groups.c.id == group_id)
    row = connection.execute(query).mappings().first()
    if row is None:
        raise NotFound(
            f"no group {group_id!r} in run {run!r}", hint="upload it: PUT /v1/runs/{run}/groups/{id}"
        )
    return to_record(row)


def read_many(connection: Connection, run: str, group_ids: Sequence[str]) -> list[GroupRecord]:
    """Return the groups in the given order, or raise NotFound if one is missing."""
    found: dict[str, GroupRecord] = {}
    for part in _chunks(group_ids):
        query = select(schema.groups).where(schema.groups.c.run == run, schema.groups.c.id.in_(part))
        for row in connection.execute(query).mappings():
            found[row["id"]] = to_record(row)
    missing = [group_id for group_id in group_ids if group_id not in found]
    if missing:
        raise NotFound(f"run {run!r} has no groups {', '.join(missing[:_SHOWN])} ({len(missing)} missing)")
    return [found[group_id] for group_id in group_ids]


def calls_in_use(connection: Connection, run: str, after_step: int) -> dict[str, str]:
    """Map every call in a group to that group; skip groups trained on in steps up to `after_step`."""
    groups = schema.groups
    recent = groups.c.step.is_(None) | (groups.c.step > after_step)
    query = select(groups.c.id, groups.c.trajectories).where(groups.c.run == run, recent)
    return {
        call_id: group_id
        for group_id, packed in connection.execute(query)
        for trajectory in orjson.loads(zlib.decompress(packed))
        for call_id in trajectory["call_ids"]
    }


def open_rollouts(connection: Connection, names: Sequence[str], but_of: str | None) -> set[str]:
    """Return those of the rollouts that are in groups yet to be trained on, but those of the run `but_of`."""
    groups, rollouts = schema.groups, schema.rollouts
    both = rollouts.join(groups, (groups.c.run == rollouts.c.run) & (groups.c.id == rollouts.c.group_id))
    query = select(rollouts.c.rollout_id).select_from(both).where(groups.c.state != GroupState.CONSUMED)
    if but_of is not None:
        query = query.where(rollouts.c.run != but_of)
    found: set[str] = set()
    for part in _chunks(names):
        found.update(connection.execute(query.where(rollouts.c.rollout_id.in_(part))).scalars())
    return found


def open_calls(connection: Connection, among: Collection[str], but_of: str | None) -> set[str]:
    """Return those of the calls that are in such groups, which are read one by one."""
    groups = schema.groups
    query = select(groups.c.trajectories).where(groups.c.state != GroupState.CONSUMED)
    if but_of is not None:
        query = query.where(groups.c.run != but_of)
    found: set[str] = set()
    for packed in connection.execute(query.execution_options(yield_per=_SHOWN)).scalars():
        for trajectory in orjson.loads(zlib.decompress(packed)):
            found.update(one for one in trajectory["call_ids"] if one in among)
    return found


def claim(connection: Connection, run: str, group_ids: Sequence[str], job_id: str) -> None:
    """Claim all the groups for the job, or none; the error names the first that is not available."""
    groups = schema.groups
    states: dict[str, tuple[GroupState, str | None]] = {}
    for part in _chunks(group_ids):
        query = select(groups.c.id, groups.c.state, groups.c.job_id)
        query = query.where(groups.c.run == run, groups.c.id.in_(part)).with_for_update()
        for row in connection.execute(query):
            states[row[0]] = (GroupState(row[1]), row[2])
    missing = [group_id for group_id in group_ids if group_id not in states]
    if missing:
        raise NotFound(
            f"run {run!r} has no groups {', '.join(missing[:_SHOWN])} ({len(missing)} missing)",
            hint="upload them first: PUT /v1/runs/{run}/groups/{id}",
        )
    for group_id in group_ids:
        state, owner = states[group_id]
        what = f"group {group_id!r} of run {run!r}" + (f" (job {owner})" if owner else "")
        check_transition(GROUP_TRANSITIONS, what, state, GroupState.CLAIMED)
    for part in _chunks(group_ids):
        connection.execute(
            update(groups)
            .where(groups.c.run == run, groups.c.id.in_(part))
            .values(state=GroupState.CLAIMED, job_id=job_id)
        )


def release(connection: Connection, job_id: str) -> None:
    """Return the groups of a job that will not train to `received`, free for another job."""
    _move_all(connection, job_id, {"state": GroupState.RECEIVED, "job_id": None})


def consume(connection: Connection, job_id: str, step: int, num_groups: int) -> None:
    """Mark the job's groups as trained on, for good; they must be exactly the ones it claimed."""
    moved = _move_all(connection, job_id, {"state": GroupState.CONSUMED, "step": step})
    if moved != num_groups:
        raise Conflict(
            f"job {job_id} named {num_groups} groups but holds {moved}",
            hint="this is a defect of the ledger; keep the state directory and report it",
        )


def reclaim(connection: Connection, job_id: str) -> None:
    """Give the groups of a lost step back to its job, which trains on them again."""
    groups = schema.groups
    mine = (groups.c.job_id == job_id) & (groups.c.state == GroupState.CONSUMED)
    connection.execute(update(groups).where(mine).values(state=GroupState.CLAIMED, step=None))


def _move_all(connection: Connection, job_id: str, values: Mapping[str, object]) -> int:
    groups = schema.groups
    claimed = (groups.c.job_id == job_id) & (groups.c.state == GroupState.CLAIMED)
    return connection.execute(update(groups).where(claimed).values(**values)).rowcount


def _chunks(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), _CHUNK):
        yield ids[start : start + _CHUNK]
