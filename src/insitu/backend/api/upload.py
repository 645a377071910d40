"""Read a group from a streamed NDJSON body, line by line.

    {"group": {"num_trajectories": 2}}
    {"trajectory": {"rollout_id": "a", "reward": 1.0, "call_ids": ["call-1", "call-2"]}}
    {"trajectory": {"rollout_id": "b", "reward": 0.0, "num_inline_calls": 1}}
    {"call": {"prompt_ids": [...], "output_ids": [...], "logprobs": [...], ...}}

At most one line and one small batch of inline calls are in memory at a time; more wait in a temporary file.
They go to the record store once the whole upload is accepted, so one that is rejected or cut off leaves
nothing. Their ids contain a hash of their content: a corrected upload never gets a stale call.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Self, TypeVar, cast

import orjson
from starlette.concurrency import run_in_threadpool

from insitu.access.projects import EVERYTHING, Project
from insitu.backend.api.lines import read_lines
from insitu.backend.api.settings import Limits, Records
from insitu.backend.ledger import Run
from insitu.errors import CannotHonour, InvalidRequest, TooLarge
from insitu.json_values import as_object
from insitu.records.old_calls import deleted_hint
from insitu.types import INCOMPLETE, ModelCall, Trajectory, TrajectoryGroup
from insitu.wire.group_upload import GroupHead, GroupLine, InlineCall, TrajectoryHead
from insitu.wire.headers import CALL_ID_HEADER
from insitu.wire.message import Malformed, Message, encode, read, read_object, shallow

_BATCH_CALLS = 64
_BATCH_BYTES = 4 * 2**20
_PARSE_IN_THREAD_BYTES = 256 * 2**10
_LISTED = 20
_REASSIGNED = frozenset({"id", "source", "rollout_id", "run"})
_UNHASHED = (("function", None), ("protocol", "chat"))
_KINDS: dict[type[Message], str] = {GroupHead: "group", TrajectoryHead: "trajectory", InlineCall: "call"}

Part = TypeVar("Part", bound=Message)


class GroupReader:
    """Parses one upload, stores its inline calls and hashes its content."""

    def __init__(
        self, run: Run, group_id: str, records: Records, limits: Limits, sender: Project = EVERYTHING
    ) -> None:
        """`sender` names rollouts and calls; they are stored within its project."""
        self._sender = sender
        self._run = run
        self._group_id = group_id
        self._records = records
        self._limits = limits
        self._line_number = 0
        self._hash = hashlib.sha256()
        self._num_inline = 0
        self._calls = tempfile.SpooledTemporaryFile[bytes](max_size=_BATCH_BYTES)
        """The inline calls, a line each."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.close()

    async def read(self, chunks: AsyncIterator[bytes]) -> tuple[TrajectoryGroup, str]:
        """Return the group and its body hash; `store` then stores its inline calls."""
        lines = read_lines(chunks, self._limits)
        head, _ = await self._expect(lines, GroupHead)
        if head.num_trajectories > self._limits.max_trajectories:
            raise TooLarge(
                f"{head.num_trajectories} trajectories; at most {self._limits.max_trajectories} a group"
            )
        self._hash.update(b"%d;" % head.num_trajectories)
        trajectories = [await self._trajectory(lines) for _ in range(head.num_trajectories)]
        async for _ in lines:
            raise InvalidRequest(
                f"line {self._line_number + 1} is beyond the {head.num_trajectories} trajectories announced",
                hint="num_trajectories and num_inline_calls must match the lines that follow",
            )
        referenced = [t for t in trajectories if not t.call_ids[0].startswith("inline:")]
        await self._check_references(referenced)
        await self._check_age([call_id for t in trajectories for call_id in t.call_ids])
        return TrajectoryGroup(id=self._group_id, run=self._run.name, trajectories=trajectories), (
            self._hash.hexdigest()
        )

    async def _trajectory(self, lines: AsyncIterator[bytes]) -> Trajectory:
        head, _ = await self._expect(lines, TrajectoryHead)
        most = self._limits.max_calls_per_trajectory
        if max(len(head.call_ids), head.num_inline_calls) > most:
            raise TooLarge(f"rollout {head.rollout_id!r} has over {most} calls")
        if any(call_id.startswith("inline:") for call_id in head.call_ids):
            raise InvalidRequest(f"rollout {head.rollout_id!r} names calls of another upload in call_ids")
        said = shallow(head)
        if head.step_rewards is None:
            del said["step_rewards"]  # not hashed, so that repeats of older uploads still match
        self._hash.update(_canonical(said))
        stored = self._sender.stored
        head = replace(
            head, rollout_id=stored(head.rollout_id), call_ids=[stored(call_id) for call_id in head.call_ids]
        )
        inline = [await self._inline(lines, head) for _ in range(head.num_inline_calls)]
        return Trajectory(
            rollout_id=head.rollout_id,
            call_ids=head.call_ids or inline,
            reward=head.reward,
            ending=head.ending,
            metadata=head.metadata,
            step_rewards=head.step_rewards,
        )

    async def _inline(self, lines: AsyncIterator[bytes], head: TrajectoryHead) -> str:
        body, _ = await self._expect(lines, InlineCall)
        rollout, run = (name and self._sender.stored(name) for name in (body.rollout_id, body.run))
        self._check_belongs(head.rollout_id, rollout, run)
        self._check_length(head.rollout_id, len(body.prompt_ids) + len(body.output_ids))
        # Newer fields at their defaults are not hashed, so that repeats of older uploads still match.
        hashed = {
            name: value
            for name, value in shallow(body).items()
            if name not in _REASSIGNED and (name, value) not in _UNHASHED
        }
        digest = hashlib.sha256(_canonical(hashed)).hexdigest()
        self._hash.update(digest.encode())
        call_id = f"inline:{self._run.name}:{self._group_id}:{self._num_inline}:{digest[:24]}"
        self._num_inline += 1
        call = self._recorded(call_id, head.rollout_id, body)
        await run_in_threadpool(self._calls.write, encode(call) + b"\n")
        return call_id

    def _recorded(self, call_id: str, rollout_id: str, body: InlineCall) -> ModelCall:
        fields = {name: value for name, value in shallow(body).items() if name not in _REASSIGNED}
        fields["model"] = body.model or self._run.name
        fields["started_at"] = time.time()  # on this backend, which may delete calls by their age
        return ModelCall(id=call_id, rollout_id=rollout_id, run=self._run.name, source="inline", **fields)

    def store(self) -> None:
        """Store the inline calls; those that are there already stay."""
        self._calls.seek(0)
        batch: list[ModelCall] = []
        num_bytes = 0
        for line in self._calls:
            batch.append(read(ModelCall, line))
            num_bytes += len(line)
            if len(batch) >= _BATCH_CALLS or num_bytes >= _BATCH_BYTES:
                self._records.append(batch)
                batch, num_bytes = [], 0
        if batch:
            self._records.append(batch)

    async def _check_references(self, trajectories: Sequence[Trajectory]) -> None:
        """Check that named calls are complete and belong to their rollouts, and that the last ones fit."""
        if not trajectories:
            return
        named: dict[str, str] = {}
        for trajectory in trajectories:
            for call_id in trajectory.call_ids:
                if call_id in named:
                    raise InvalidRequest(f"call {call_id} is named twice", hint="name each call once")
                named[call_id] = trajectory.rollout_id
        await self._await_records(list(named))
        for call_id, head in (await run_in_threadpool(self._records.heads, list(named))).items():
            self._check_belongs(named[call_id], head.rollout_id, head.run)
            if head.finish_reason in INCOMPLETE:
                raise CannotHonour(
                    f"rollout {named[call_id]!r} names call {call_id}, which ended `{head.finish_reason}`: "
                    "nothing that broke off is trained on",
                    hint="leave calls out whose finish_reason is cancelled or broken",
                )
        # The last call holds the whole conversation, so it is the longest: the others need not be read.
        last = await run_in_threadpool(self._records.get, [t.call_ids[-1] for t in trajectories])
        for trajectory, call in zip(trajectories, last, strict=True):
            self._check_length(trajectory.rollout_id, len(call.prompt_ids) + len(call.output_ids))

    async def _await_records(self, call_ids: list[str]) -> None:
        # The gateway records off its hot path: a call may be answered a moment before it is stored.
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.record_lag_seconds
        while True:
            known = await run_in_threadpool(self._records.exists, call_ids)
            call_ids = [call_id for call_id in call_ids if call_id not in known]
            if not call_ids:
                return
            if loop.time() >= deadline:
                listed = ", ".join(call_ids[:_LISTED]) + (" …" if len(call_ids) > _LISTED else "")
                raise CannotHonour(
                    f"{len(call_ids)} named calls are not recorded here: {listed}",
                    hint=f"take ids from the gateway's {CALL_ID_HEADER} header, or send the calls inline"
                    + deleted_hint(self._limits.max_call_age_seconds),
                )
            await asyncio.sleep(0.05)

    async def _check_age(self, call_ids: list[str]) -> None:
        """Reject calls that may be deleted before the group is stored."""
        keep_seconds = self._limits.max_call_age_seconds
        if keep_seconds is None:
            return
        oldest = time.time() - keep_seconds
        heads = await run_in_threadpool(self._records.heads, call_ids)
        old = [call_id for call_id, head in heads.items() if head.started_at < oldest]
        if old:
            raise CannotHonour(
                f"{len(old)} named calls are too old, the first is {old[0]}",
                hint="collect the rollouts again" + deleted_hint(keep_seconds),
            )

    def _check_belongs(self, rollout_id: str, call_rollout: str | None, call_run: str | None) -> None:
        if call_rollout not in (None, rollout_id):
            raise CannotHonour(f"rollout {rollout_id!r} holds a call of rollout {call_rollout!r}")
        if call_run not in (None, self._run.name):
            raise CannotHonour(
                f"rollout {rollout_id!r} was sampled from run {call_run!r}, not {self._run.name!r}",
                hint=f"call the model {self._run.name!r} in rollouts of this run",
            )

    def _check_length(self, rollout_id: str, length: int) -> None:
        limit = max_seq_length(self._run)
        if limit is not None and length > limit:
            raise CannotHonour(
                f"rollout {rollout_id!r} has a sequence of {length} tokens, over max_seq_length {limit}",
                hint="register the run with a larger max_seq_length, or leave the rollout out",
            )

    async def _expect(self, lines: AsyncIterator[bytes], kind: type[Part]) -> tuple[Part, int]:
        """Read the next line, which must be of this kind; return it with its size in bytes."""
        wanted = _KINDS[kind]
        line = await anext(lines, None)
        if line is None:
            raise InvalidRequest(
                f"the body ends after line {self._line_number}, a {wanted!r} line was announced",
                hint="upload the whole group again under the same id",
            )
        self._line_number += 1
        # Parsing a large line here would block every other request.
        in_thread = len(line) > _PARSE_IN_THREAD_BYTES
        parsed, found = await run_in_threadpool(self._parse, line) if in_thread else self._parse(line)
        part = {"group": parsed.group, "trajectory": parsed.trajectory, "call": parsed.call}[wanted]
        if found != {wanted} or not isinstance(part, kind):
            held = ", ".join(sorted(found)) or "nothing"
            raise InvalidRequest(f"line {self._line_number} holds {held}, expected {wanted!r}")
        return part, len(line)

    def _parse(self, line: bytes) -> tuple[GroupLine, set[str]]:
        """Return the line and the names it holds, null or not."""
        try:
            value = cast(object, orjson.loads(line))
            return read_object(GroupLine, value), set(as_object(value) or ())
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"line {self._line_number} is not JSON: {error}") from error
        except Malformed as error:
            raise InvalidRequest(f"line {self._line_number}: {error}") from error


def max_seq_length(run: Run) -> int | None:
    """Return the longest sequence the run was registered for; None if unlimited."""
    asked = (run.init_args.get("max_seq_length"), run.engine_args.get("max_seq_length"))
    limits = [value for value in (*asked, run.engine_args.get("max_model_len")) if isinstance(value, int)]
    return min(limits, default=None)


def _canonical(value: object) -> bytes:
    """Serialise to the same bytes for the same content, whatever the order of keys."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
