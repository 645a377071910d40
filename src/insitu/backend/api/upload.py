"""Read a group from a streamed NDJSON body, line by line.

    {"group": {"num_trajectories": 2}}
    {"trajectory": {"rollout_id": "a", "reward": 1.0, "call_ids": ["call-1", "call-2"]}}
    {"trajectory": {"rollout_id": "b", "reward": 0.0, "num_inline_calls": 1}}
    {"call": {"prompt_ids": [...], "output_ids": [...], "logprobs": [...], ...}}

At most one line and one small batch of inline calls are in memory at a time. Inline calls go to the record
store while the body is still being read; their ids contain a hash of their content, so an upload that is
cut off and retried, with the same body or a corrected one, never gets a stale call.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool

from insitu.backend.api.bodies import GroupHead, GroupLine, InlineCall, TrajectoryHead
from insitu.backend.api.settings import Limits, Records
from insitu.backend.ledger import Run
from insitu.errors import CannotHonour, DeadlineExceeded, InvalidRequest, TooLarge
from insitu.types import ModelCall, Trajectory, TrajectoryGroup
from insitu.wire.headers import CALL_ID_HEADER
from insitu.wire.message import describe

_BATCH_CALLS = 64
_BATCH_BYTES = 4 * 2**20
_PARSE_IN_THREAD_BYTES = 256 * 2**10
_LISTED = 20
_UNHASHED = (("function", None), ("protocol", "chat"))
_KINDS: dict[type[BaseModel], str] = {GroupHead: "group", TrajectoryHead: "trajectory", InlineCall: "call"}

Part = TypeVar("Part", bound=BaseModel)


async def read_lines(chunks: AsyncIterator[bytes], limits: Limits) -> AsyncIterator[bytes]:
    """Yield a body's non-empty lines, enforcing limits per line and in total; time out when it stalls."""
    buffer = bytearray()
    total = 0
    iterator = aiter(chunks)
    while True:
        try:
            async with asyncio.timeout(limits.upload_idle_seconds):
                chunk = await anext(iterator)
        except StopAsyncIteration:
            break
        except TimeoutError:
            raise DeadlineExceeded(
                f"no byte of the group arrived for {limits.upload_idle_seconds:.0f} s after {total} bytes",
                hint="upload it again under the same id",
            ) from None
        total += len(chunk)
        if total > limits.max_group_bytes:
            raise TooLarge(
                f"the group is over {limits.max_group_bytes} bytes", hint="split it into smaller ones"
            )
        # Search only the new bytes: a long line arrives in many chunks.
        *heads, rest = chunk.split(b"\n")
        for head in heads:
            _check_line(len(buffer) + len(head), limits)
            line = bytes(buffer + head)
            buffer.clear()
            if line.strip():
                yield line
        _check_line(len(buffer) + len(rest), limits)
        buffer += rest
    if buffer.strip():
        yield bytes(buffer)


def _check_line(length: int, limits: Limits) -> None:
    if length > limits.max_line_bytes:
        raise TooLarge(f"a line of the group is over {limits.max_line_bytes} bytes")


class GroupReader:
    """Parses one upload, stores its inline calls and hashes its content."""

    def __init__(self, run: Run, group_id: str, records: Records, limits: Limits) -> None:
        self._run = run
        self._group_id = group_id
        self._records = records
        self._limits = limits
        self._line_number = 0
        self._hash = hashlib.sha256()
        self._num_inline = 0
        self._batch: list[ModelCall] = []
        self._batch_bytes = 0

    async def read(self, chunks: AsyncIterator[bytes]) -> tuple[TrajectoryGroup, str]:
        """Return the group and its body hash; every call it names is then in the record store."""
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
        await self._flush()
        referenced = [t for t in trajectories if not t.call_ids[0].startswith("inline:")]
        await self._check_references(referenced)
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
        unsaid = {"step_rewards"} if head.step_rewards is None else set[str]()
        self._hash.update(_canonical(head.model_dump(mode="json", exclude=unsaid)))
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
        body, num_bytes = await self._expect(lines, InlineCall)
        self._check_belongs(head.rollout_id, body.rollout_id, body.run)
        self._check_length(head.rollout_id, len(body.prompt_ids) + len(body.output_ids))
        fields = body.model_dump(exclude={"id", "source", "rollout_id", "run"})
        # Newer fields at their defaults are not hashed, so that repeats of older uploads still match.
        hashed = {name: value for name, value in fields.items() if (name, value) not in _UNHASHED}
        digest = hashlib.sha256(_canonical(hashed)).hexdigest()
        self._hash.update(digest.encode())
        call_id = f"inline:{self._run.name}:{self._group_id}:{self._num_inline}:{digest[:24]}"
        self._num_inline += 1
        fields["model"] = body.model or self._run.name
        call = ModelCall(
            id=call_id, rollout_id=head.rollout_id, run=self._run.name, source="inline", **fields
        )
        self._batch.append(call)
        self._batch_bytes += num_bytes
        if len(self._batch) >= _BATCH_CALLS or self._batch_bytes >= _BATCH_BYTES:
            await self._flush()
        return call_id

    async def _flush(self) -> None:
        if self._batch:
            await run_in_threadpool(self._records.append, self._batch)
        self._batch, self._batch_bytes = [], 0

    async def _check_references(self, trajectories: Sequence[Trajectory]) -> None:
        """Check that named calls are complete and that each rollout's last call belongs to it and fits."""
        if not trajectories:
            return
        named = {call_id: t.rollout_id for t in trajectories for call_id in t.call_ids}
        await self._await_records(list(named))
        for call_id, ended in (await run_in_threadpool(self._records.incomplete, list(named))).items():
            raise CannotHonour(
                f"rollout {named[call_id]!r} names call {call_id}, which ended `{ended}`: nothing that broke "
                f"off is trained on",
                hint="leave calls out whose finish_reason is cancelled or broken",
            )
        # The last call holds the whole conversation, so it is the longest: the others need not be read.
        last = await run_in_threadpool(self._records.get, [t.call_ids[-1] for t in trajectories])
        for trajectory, call in zip(trajectories, last, strict=True):
            self._check_belongs(trajectory.rollout_id, call.rollout_id, call.run)
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
                    hint=f"take ids from the gateway's {CALL_ID_HEADER} header, or send the calls inline",
                )
            await asyncio.sleep(0.05)

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
        parsed = await run_in_threadpool(self._parse, line) if in_thread else self._parse(line)
        part = getattr(parsed, wanted)
        if parsed.model_fields_set != {wanted} or not isinstance(part, kind):
            found = ", ".join(sorted(parsed.model_fields_set)) or "nothing"
            raise InvalidRequest(f"line {self._line_number} holds {found}, expected {wanted!r}")
        return part, len(line)

    def _parse(self, line: bytes) -> GroupLine:
        try:
            return GroupLine.model_validate(orjson.loads(line))
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"line {self._line_number} is not JSON: {error}") from error
        except ValidationError as error:
            raise InvalidRequest(f"line {self._line_number}: {describe(error.errors())}") from error


def max_seq_length(run: Run) -> int | None:
    """Return the longest sequence the run was registered for; None if unlimited."""
    asked = (run.init_args.get("max_seq_length"), run.engine_args.get("max_seq_length"))
    limits = [value for value in (*asked, run.engine_args.get("max_model_len")) if isinstance(value, int)]
    return min(limits, default=None)


def _canonical(value: Any) -> bytes:
    """Serialise to the same bytes for the same content, whatever the order of keys."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
