"""The typed client of the backend API.

Every write carries an id of the caller (run name, group id, idempotency key), so a request whose answer was
lost is simply sent again: connection errors, 429 and 5xx answers are retried with the same ids, with jitter
and within a bound. Everything else is raised as the error that the server named.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from types import TracebackType
from typing import Any, Self, cast
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
from insitu.types import (
    GroupState,
    JobState,
    LoraSettings,
    ModelCall,
    RunState,
    StepSettings,
    TrajectoryGroup,
)

_BROKEN = (aiohttp.ClientError, TimeoutError, OSError)
"""How a connection fails."""

_RETRIED_STATUS = frozenset({429, 500, 502, 503, 504})
_MAX_RETRY_AFTER_SECONDS = 30.0
_UPLOAD_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a request is sent again and how long is waited between, at most."""

    max_attempts: int = 8
    first_seconds: float = 0.1
    most_seconds: float = 5.0

    def pause(self, attempt: int) -> float:
        """A random share of an exponentially growing time: clients that failed together spread out."""
        return random.uniform(0.5, 1.0) * min(self.most_seconds, self.first_seconds * 2**attempt)  # noqa: S311


class InsituClient:
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
        self._base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._retry = retry or RetryPolicy()
        self._request_timeout = aiohttp.ClientTimeout(total=request_seconds, connect=10)
        self._upload_timeout = aiohttp.ClientTimeout(total=upload_seconds, connect=10)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def health(self) -> Json:
        """What works on the backend."""
        return await self._call("GET", "/health")

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
        """Register the run; the same settings again are harmless, others raise Conflict."""
        body = {
            "project": project,
            "name": name,
            "base_model": base_model,
            "lora": asdict(lora or LoraSettings()),
            "engine_args": dict(engine_args or {}),
            "init_args": dict(init_args or {}),
        }
        return to_run(await self._call("POST", "/v1/runs", body=body))

    async def get_run(self, name: str) -> RunInfo:
        """One run."""
        return to_run(await self._call("GET", f"/v1/runs/{quote(name, safe='')}"))

    async def list_runs(self) -> list[RunInfo]:
        """All runs, oldest first."""
        return [to_run(fields) for fields in (await self._call("GET", "/v1/runs"))["runs"]]

    async def close_run(self, name: str) -> RunInfo:
        """Close a run that has no open jobs."""
        return to_run(await self._call("POST", f"/v1/runs/{quote(name, safe='')}/close"))

    async def wait_run_ready(
        self, name: str, deadline_seconds: float, *, poll_seconds: float = 0.5
    ) -> RunInfo:
        """The run once it is ready; ChildFailed with its error if it fails or is closed."""

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
        """Upload a group, streamed. Rollouts in `inline` send these calls instead of naming recorded ones."""
        path = f"/v1/runs/{quote(group.run, safe='')}/groups/{quote(group.id, safe='')}"
        fields = await self._call("PUT", path, upload=lambda: _group_lines(group, inline or {}))
        return build(GroupReceipt, fields, state=GroupState(fields["state"]))

    async def get_group(self, run: str, group_id: str) -> Json:
        """A group and what became of it, as the API answers it."""
        return await self._call("GET", f"/v1/runs/{quote(run, safe='')}/groups/{quote(group_id, safe='')}")

    async def submit_step(
        self,
        run: str,
        group_ids: Sequence[str],
        settings: StepSettings | None = None,
        *,
        idempotency_key: str,
    ) -> JobInfo:
        """Queue a training step. The same key and arguments always give the same job."""
        body = {"groups": list(group_ids), "settings": asdict(settings or StepSettings())}
        path = f"/v1/runs/{quote(run, safe='')}/steps"
        return to_job(await self._call("POST", path, body=body, headers={"Idempotency-Key": idempotency_key}))

    async def get_job(self, job_id: str) -> JobInfo:
        """One job."""
        return to_job(await self._call("GET", f"/v1/jobs/{quote(job_id, safe='')}"))

    async def cancel_job(self, job_id: str) -> JobInfo:
        """Cancel a queued job."""
        return to_job(await self._call("POST", f"/v1/jobs/{quote(job_id, safe='')}/cancel"))

    async def wait_job(self, job_id: str, deadline_seconds: float, *, poll_seconds: float = 0.25) -> JobInfo:
        """The job once it has succeeded; ChildFailed with its error if it failed or was cancelled."""

        def done(job: JobInfo) -> bool:
            if job.state in (JobState.FAILED, JobState.CANCELLED):
                raise errors.ChildFailed(f"job {job_id} is {job.state}: {job.error or 'no reason given'}")
            return job.state is JobState.SUCCEEDED

        def say(job: JobInfo) -> str:
            where = f" in phase {job.phase!r} ({job.progress:.0%})" if job.phase else ""
            return f"job {job_id} to end; it is {job.state}{where}"

        return await self._wait(lambda: self.get_job(job_id), done, say, deadline_seconds, poll_seconds)

    async def steps(self, run: str, after: int = 0) -> list[StepInfo]:
        """Committed steps after `after`, at most a thousand."""
        answer = await self._call("GET", f"/v1/runs/{quote(run, safe='')}/steps?after={after}")
        return [build(StepInfo, fields) for fields in answer["steps"]]

    async def checkpoints(self, run: str) -> list[CheckpointInfo]:
        """Kept checkpoints, oldest first."""
        answer = await self._call("GET", f"/v1/runs/{quote(run, safe='')}/checkpoints")
        return [build(CheckpointInfo, fields) for fields in answer["checkpoints"]]

    async def events(
        self, job_id: str, *, after: int = 0, idle_seconds: float = 60.0
    ) -> AsyncIterator[EventInfo]:
        """The job's events until it ends, each once; a broken stream is resumed after the last one seen."""
        attempt = 0
        while True:
            cause: Exception = errors.Unavailable("the server ended the stream before the job did")
            try:
                async for event in self._stream(job_id, after, idle_seconds):
                    if event is None:
                        return
                    after, attempt = event.seq, 0
                    yield event
            except (*_BROKEN, errors.Unavailable, errors.Overloaded) as error:
                cause = error
            attempt += 1
            if attempt >= self._retry.max_attempts:
                raise errors.Unavailable(
                    f"the event stream of job {job_id} broke {attempt} times: {_text(cause)}",
                    hint=f"check that the backend runs: GET {self._base_url}/health",
                ) from cause
            await asyncio.sleep(self._retry.pause(attempt))

    async def _stream(self, job_id: str, after: int, idle_seconds: float) -> AsyncIterator[EventInfo | None]:
        """One connection's worth of events; None is the server's word that there are no more."""
        timeout = aiohttp.ClientTimeout(total=None, connect=10, sock_read=idle_seconds)
        url = f"{self._base_url}/v1/jobs/{quote(job_id, safe='')}/events"
        headers = {**self._headers, "Last-Event-ID": str(after)}
        async with self._open().get(url, headers=headers, timeout=timeout) as response:
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
                f"waited {deadline_seconds:.0f} s for {waited}", hint=f"look at {self._base_url}/health"
            ) from None

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Json | None = None,
        upload: Callable[[], AsyncIterator[bytes]] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        """Send until it is answered for good. Safe for every route: all writes are idempotent."""
        sent = {**self._headers, **(headers or {})}
        if upload is not None:
            sent["Content-Type"] = "application/x-ndjson"
        elif body is not None:
            sent["Content-Type"] = "application/json"
        packed = None if body is None else orjson.dumps(body)
        timeout = self._request_timeout if upload is None else self._upload_timeout
        for attempt in range(self._retry.max_attempts):
            last = attempt + 1 == self._retry.max_attempts
            pause = self._retry.pause(attempt)
            try:
                data = packed if upload is None else upload()
                url = self._base_url + path
                async with self._open().request(
                    method, url, data=data, headers=sent, timeout=timeout
                ) as answer:
                    content = await answer.read()
                if answer.status < 400:
                    return cast(Json, orjson.loads(content))
                error = to_error(answer.status, content)
                if answer.status not in _RETRIED_STATUS or last:
                    raise error
                pause = max(pause, _retry_after(answer))
            except _BROKEN as error:
                if isinstance(error.__cause__, errors.InsituError | TypeError):
                    # The body itself could not be made: sending it again cannot help.
                    raise error.__cause__ from None
                if last:
                    raise errors.Unavailable(
                        f"{method} {self._base_url}{path} failed {attempt + 1} times: {_text(error)}",
                        hint="check that the backend runs: insitu serve",
                    ) from error
            await asyncio.sleep(pause)
        raise AssertionError("max_attempts must be at least 1")

    def _open(self) -> aiohttp.ClientSession:
        # Made on first use: a session belongs to the running loop. Proxies of the environment are not used.
        if self._session is None:
            self._session = aiohttp.ClientSession(read_bufsize=2**20)
        return self._session


async def _group_lines(
    group: TrajectoryGroup, inline: Mapping[str, Sequence[ModelCall]]
) -> AsyncIterator[bytes]:
    """The upload in pieces of whole lines; large groups are never one body in memory."""
    buffer = bytearray(_line({"group": {"num_trajectories": len(group.trajectories)}}))
    for trajectory in group.trajectories:
        _check_finite([trajectory.reward, trajectory.metadata], trajectory.rollout_id)
        calls = inline.get(trajectory.rollout_id, ())
        head = {
            "rollout_id": trajectory.rollout_id,
            "reward": trajectory.reward,
            "ending": trajectory.ending,
            "call_ids": [] if calls else trajectory.call_ids,
            "num_inline_calls": len(calls),
            "metadata": trajectory.metadata,
        }
        for line in chain([{"trajectory": head}], ({"call": call} for call in calls)):
            buffer += _line(line)
            if len(buffer) >= _UPLOAD_BYTES:
                yield bytes(buffer)
                buffer.clear()
    if buffer:
        yield bytes(buffer)


def _line(value: Json) -> bytes:
    # Dataclasses as they are: `asdict` would copy every token id.
    return orjson.dumps(value) + b"\n"


def _check_finite(value: object, rollout_id: str) -> None:
    """Refuse NaN and infinities here: on the wire they would become null without a word."""
    if isinstance(value, float) and not math.isfinite(value):
        raise errors.InvalidRequest(
            f"rollout {rollout_id!r} holds the number {value}", hint="check its reward and metadata"
        )
    if isinstance(value, dict):
        value = list(cast(Json, value).values())
    if isinstance(value, list):
        for item in cast(list[object], value):
            _check_finite(item, rollout_id)


def _retry_after(answer: aiohttp.ClientResponse) -> float:
    value = answer.headers.get("Retry-After", "")
    return min(float(value), _MAX_RETRY_AFTER_SECONDS) if value.isdigit() else 0.0


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
