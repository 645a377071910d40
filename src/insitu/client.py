"""The typed client of the backend API.

Every write carries an id chosen by the caller (run name, group id, idempotency key), so a request whose
response was lost can simply be retried with the same ids.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any, cast
from urllib.parse import quote

import aiohttp
import orjson

from insitu import errors
from insitu.answers import (
    CheckpointInfo,
    EventInfo,
    GroupReceipt,
    JobInfo,
    Json,
    RunInfo,
    StepInfo,
    Value,
    build,
    to_error,
    to_job,
    to_run,
)
from insitu.transport import BROKEN, Connected, RetryPolicy, Transport, text_of
from insitu.types import (
    GroupState,
    JobState,
    LoraSettings,
    ModelCall,
    RunState,
    StepSettings,
    TrajectoryGroup,
)

_UPLOAD_BYTES = 64 * 2**10


class InsituClient(Connected):
    """Talks to one backend. Use it as `async with InsituClient(url, key) as client`."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        retry: RetryPolicy | None = None,
        request_seconds: float = 60.0,
        upload_seconds: float = 600.0,
    ) -> None:
        super().__init__(Transport(base_url, api_key, retry=retry, request_seconds=request_seconds))
        self._upload_seconds = upload_seconds

    async def health(self) -> Json:
        """Return the backend's health."""
        return await self._transport.call("GET", "/health")

    async def register_run(
        self,
        name: str,
        base_model: str,
        *,
        project: str = "default",
        lora: LoraSettings | None = None,
        engine_args: Mapping[str, Any] | None = None,
        init_args: Mapping[str, Any] | None = None,
    ) -> RunInfo:
        """Register a run. Repeating it with the same settings is harmless; other settings raise Conflict."""
        body = {
            "project": project,
            "name": name,
            "base_model": base_model,
            "lora": asdict(lora or LoraSettings()),
            "engine_args": dict(engine_args or {}),
            "init_args": dict(init_args or {}),
        }
        return to_run(await self._transport.call("POST", "/v1/runs", body=body))

    async def get_run(self, name: str) -> RunInfo:
        """Return one run."""
        return to_run(await self._transport.call("GET", f"/v1/runs/{quote(name, safe='')}"))

    async def list_runs(self) -> list[RunInfo]:
        """Return all runs, oldest first."""
        return [to_run(fields) for fields in (await self._transport.call("GET", "/v1/runs"))["runs"]]

    async def close_run(self, name: str) -> RunInfo:
        """Close a run that has no open jobs."""
        return to_run(await self._transport.call("POST", f"/v1/runs/{quote(name, safe='')}/close"))

    async def wait_run_ready(
        self, name: str, deadline_seconds: float, *, poll_seconds: float = 0.5
    ) -> RunInfo:
        """Wait until the run is ready; raise ChildFailed with its error if it fails or is closed."""

        def done(run: RunInfo) -> bool:
            if run.state in (RunState.FAILED, RunState.CLOSED):
                raise errors.ChildFailed(f"run {name!r} is {run.state}: {run.error or 'no reason given'}")
            return run.state is RunState.READY

        def say(run: RunInfo) -> str:
            return f"run {name!r} to be ready; it is {run.state}"

        return await self._wait(lambda: self.get_run(name), done, say, deadline_seconds, poll_seconds)

    async def put_group(
        self, group: TrajectoryGroup, inline: Mapping[str, Sequence[ModelCall]] | None = None
    ) -> GroupReceipt:
        """Stream a group's upload. Rollouts in `inline` send their calls instead of naming recorded ones."""
        path = f"/v1/runs/{quote(group.run, safe='')}/groups/{quote(group.id, safe='')}"
        fields = await self._transport.call(
            "PUT", path, upload=lambda: _group_lines(group, inline or {}), seconds=self._upload_seconds
        )
        return build(GroupReceipt, fields, state=GroupState(fields["state"]))

    async def get_group(self, run: str, group_id: str) -> Json:
        """Return a group and its outcome, as the API sends it."""
        return await self._transport.call(
            "GET", f"/v1/runs/{quote(run, safe='')}/groups/{quote(group_id, safe='')}"
        )

    async def submit_step(
        self,
        run: str,
        group_ids: Sequence[str],
        settings: StepSettings | None = None,
        *,
        idempotency_key: str,
    ) -> JobInfo:
        """Queue a training step. The same key and arguments always return the same job."""
        body = {"groups": list(group_ids), "settings": asdict(settings or StepSettings())}
        path = f"/v1/runs/{quote(run, safe='')}/steps"
        return to_job(
            await self._transport.call("POST", path, body=body, headers={"Idempotency-Key": idempotency_key})
        )

    async def get_job(self, job_id: str) -> JobInfo:
        """Return one job."""
        return to_job(await self._transport.call("GET", f"/v1/jobs/{quote(job_id, safe='')}"))

    async def cancel_job(self, job_id: str) -> JobInfo:
        """Cancel a queued job."""
        return to_job(await self._transport.call("POST", f"/v1/jobs/{quote(job_id, safe='')}/cancel"))

    async def wait_job(self, job_id: str, deadline_seconds: float, *, poll_seconds: float = 0.25) -> JobInfo:
        """Wait until the job succeeds; raise ChildFailed with its error if it fails or is cancelled."""

        def done(job: JobInfo) -> bool:
            if job.state in (JobState.FAILED, JobState.CANCELLED):
                raise errors.ChildFailed(f"job {job_id} is {job.state}: {job.error or 'no reason given'}")
            return job.state is JobState.SUCCEEDED

        def say(job: JobInfo) -> str:
            where = f" in phase {job.phase!r} ({job.progress:.0%})" if job.phase else ""
            return f"job {job_id} to end; it is {job.state}{where}"

        return await self._wait(lambda: self.get_job(job_id), done, say, deadline_seconds, poll_seconds)

    async def steps(self, run: str, after: int = 0) -> list[StepInfo]:
        """Return the committed steps after `after`, at most a thousand."""
        answer = await self._transport.call("GET", f"/v1/runs/{quote(run, safe='')}/steps?after={after}")
        return [build(StepInfo, fields) for fields in answer["steps"]]

    async def checkpoints(self, run: str) -> list[CheckpointInfo]:
        """Return the kept checkpoints, oldest first."""
        answer = await self._transport.call("GET", f"/v1/runs/{quote(run, safe='')}/checkpoints")
        return [build(CheckpointInfo, fields) for fields in answer["checkpoints"]]

    async def pin_checkpoint(self, run: str, step: int) -> CheckpointInfo:
        """Keep a checkpoint until it is unpinned, however old it becomes."""
        return build(CheckpointInfo, await self._transport.call("PUT", f"{_checkpoint_path(run, step)}/pin"))

    async def unpin_checkpoint(self, run: str, step: int) -> CheckpointInfo:
        """Unpin a checkpoint, so that it expires with age again."""
        return build(
            CheckpointInfo, await self._transport.call("DELETE", f"{_checkpoint_path(run, step)}/pin")
        )

    async def delete_checkpoint(self, run: str, step: int) -> None:
        """Delete a checkpoint and its files. Raise Conflict if it is pinned or one of the newest two.

        NotFound means that it is gone, perhaps by this very request if its first response was lost.
        """
        await self._transport.call("DELETE", _checkpoint_path(run, step))

    async def events(
        self, job_id: str, *, after: int = 0, idle_seconds: float = 60.0
    ) -> AsyncIterator[EventInfo]:
        """Yield the job's events until it ends, each once; a broken stream resumes after the last one."""
        attempt = 0
        while True:
            cause: Exception = errors.Unavailable("the server ended the stream before the job did")
            try:
                async for event in self._stream(job_id, after, idle_seconds):
                    if event is None:
                        return
                    after, attempt = event.seq, 0
                    yield event
            except (*BROKEN, errors.Unavailable, errors.Overloaded) as error:
                cause = error
            attempt += 1
            if attempt >= self._transport.retry.max_attempts:
                raise errors.Unavailable(
                    f"the event stream of job {job_id} broke {attempt} times: {text_of(cause)}",
                    hint=f"check that the backend runs: GET {self._transport.base_url}/health",
                ) from cause
            await asyncio.sleep(self._transport.retry.pause(attempt))

    async def _stream(self, job_id: str, after: int, idle_seconds: float) -> AsyncIterator[EventInfo | None]:
        """Yield the events of one connection; None means that the server has no more."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=idle_seconds)
        url = f"{self._transport.base_url}/v1/jobs/{quote(job_id, safe='')}/events"
        headers = {**self._transport.headers, "Last-Event-ID": str(after)}
        async with self._transport.open().get(url, headers=headers, timeout=timeout) as response:
            if response.status != 200:
                raise to_error(response.status, await response.read())
            kind, data = "", b""
            async for raw in response.content:
                line = raw.rstrip(b"\r\n")
                if line.startswith(b"event: "):
                    kind = line[7:].decode()
                elif line.startswith(b"data: "):
                    data = line[6:]
                elif not line and kind:
                    yield None if kind == "end" else build(EventInfo, orjson.loads(data))
                    kind, data = "", b""

    async def _wait(
        self,
        read: Callable[[], Awaitable[Value]],
        done: Callable[[Value], bool],
        say: Callable[[Value], str],
        deadline_seconds: float,
        poll_seconds: float,
    ) -> Value:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_seconds
        value: Value | None = None
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    value = await read()
                    if done(value):
                        return value
                    await asyncio.sleep(poll_seconds)
        except TimeoutError:
            waited = "the backend's first answer" if value is None else say(value)
            raise errors.DeadlineExceeded(
                f"waited {deadline_seconds:.0f} s for {waited}",
                hint=f"look at {self._transport.base_url}/health",
            ) from None


def _checkpoint_path(run: str, step: int) -> str:
    return f"/v1/runs/{quote(run, safe='')}/checkpoints/{step}"


async def _group_lines(
    group: TrajectoryGroup, inline: Mapping[str, Sequence[ModelCall]]
) -> AsyncIterator[bytes]:
    """Yield the upload in chunks of whole lines, so that a large group is never one body in memory."""
    buffer = bytearray(_line({"group": {"num_trajectories": len(group.trajectories)}}))
    for trajectory in group.trajectories:
        checked = [trajectory.reward, trajectory.metadata, trajectory.step_rewards]
        _check_finite(checked, trajectory.rollout_id)
        calls = inline.get(trajectory.rollout_id, ())
        head: Json = {
            "rollout_id": trajectory.rollout_id,
            "reward": trajectory.reward,
            "ending": trajectory.ending,
            "call_ids": [] if calls else trajectory.call_ids,
            "num_inline_calls": len(calls),
            "metadata": trajectory.metadata,
        }
        if trajectory.step_rewards is not None:
            head["step_rewards"] = trajectory.step_rewards
        for line in chain([{"trajectory": head}], ({"call": call} for call in calls)):
            buffer += _line(line)
            if len(buffer) >= _UPLOAD_BYTES:
                yield bytes(buffer)
                buffer.clear()
    if buffer:
        yield bytes(buffer)


def _line(value: Json) -> bytes:
    # Pass dataclasses as they are: `asdict` would copy every token id.
    return orjson.dumps(value) + b"\n"


def _check_finite(value: object, rollout_id: str) -> None:
    """Reject NaN and infinities here: on the wire they would silently become null."""
    if isinstance(value, float) and not math.isfinite(value):
        raise errors.InvalidRequest(
            f"rollout {rollout_id!r} holds the number {value}",
            hint="check its reward, its step rewards and its metadata",
        )
    if isinstance(value, dict):
        value = list(cast(Json, value).values())
    if isinstance(value, list):
        for item in cast(list[object], value):
            _check_finite(item, rollout_id)
