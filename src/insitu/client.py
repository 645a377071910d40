"""The typed client of the backend API.

Every write carries an id chosen by the caller (run name, group id, idempotency key), so a request whose
response was lost can simply be retried with the same ids.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import BinaryIO
from urllib.parse import quote

import aiohttp

from insitu import errors
from insitu.system.tasks import ended_by
from insitu.types import (
    JobState,
    LeaseState,
    LoraSettings,
    ModelCall,
    RunState,
    StepSettings,
    TrajectoryGroup,
)
from insitu.wire.answers import (
    MAX_WAIT_SECONDS,
    AdapterReceipt,
    CheckpointInfo,
    CheckpointList,
    DeletedRun,
    EventInfo,
    GroupInfo,
    GroupReceipt,
    Health,
    JobInfo,
    LeaseInfo,
    PromotionInfo,
    PromotionList,
    RunInfo,
    RunList,
    StepInfo,
    StepList,
    to_error,
)
from insitu.wire.bodies import LeaseBody, RunBody, StepBody
from insitu.wire.group_upload import group_lines
from insitu.wire.message import encode, read
from insitu.wire.starts.adapter_files import CheckpointFile
from insitu.wire.starts.adapter_upload import ADAPTER_TYPE, AdapterUpload
from insitu.wire.transport import BROKEN, Connected, RetryPolicy, Transport, text_of
from insitu.wire.values import Scalar

_LEASE_SECONDS = 10.0
"""For requests about a lease, which must not outlast it by much, however patient the client is."""
log = logging.getLogger(__name__)


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
        say: Callable[[str], None] = log.warning,
    ) -> None:
        """`retry` may let requests outlive an outage of the backend, which `say` is then told about."""
        super().__init__(Transport(base_url, api_key, retry=retry, request_seconds=request_seconds, say=say))
        self._upload_seconds = upload_seconds

    async def health(self) -> Health:
        """Return the backend's health."""
        return await self._transport.call(Health, "GET", "/health")

    async def register_run(
        self,
        name: str,
        base_model: str,
        *,
        project: str = "default",
        lora: LoraSettings | None = None,
        engine_args: Mapping[str, Scalar] | None = None,
        init_args: Mapping[str, Scalar] | None = None,
        init_from: str | None = None,
        fork_from: str | None = None,
    ) -> RunInfo:
        """Register a run. Repeating it with the same settings is harmless; other settings raise Conflict.

        `init_from` makes `<run>@<step>`, or an adapter of `put_adapter`, the run's step 0. `fork_from` does
        so with a step's optimizer and random state as well.
        """
        body = RunBody(
            project=project,
            name=name,
            base_model=base_model,
            lora=lora,
            engine_args=dict(engine_args or {}),
            init_args=dict(init_args or {}),
            init_from=init_from,
            fork_from=fork_from,
        )
        # Servers from before these fields reject their names.
        sent = encode(body, without=("lora", "init_from", "fork_from"))
        return await self._transport.call(RunInfo, "POST", "/v1/runs", body=sent)

    async def get_run(self, name: str) -> RunInfo:
        """Return one run."""
        return await self._transport.call(RunInfo, "GET", f"/v1/runs/{quote(name, safe='')}")

    async def list_runs(self) -> list[RunInfo]:
        """Return all runs, oldest first."""
        return (await self._transport.call(RunList, "GET", "/v1/runs")).runs

    async def close_run(self, name: str) -> RunInfo:
        """Close a run that has no open jobs."""
        return await self._transport.call(RunInfo, "POST", f"/v1/runs/{quote(name, safe='')}/close")

    async def say_alive(self, name: str) -> RunInfo:
        """Say that this client works with the run."""
        return await self._transport.call(RunInfo, "POST", f"/v1/runs/{quote(name, safe='')}/alive")

    async def release_run(self, name: str) -> RunInfo:
        """Say that nobody works with the run any more: it may go idle, and keeps everything."""
        return await self._transport.call(RunInfo, "POST", f"/v1/runs/{quote(name, safe='')}/release")

    async def delete_run(self, name: str) -> DeletedRun:
        """Delete a closed run with everything of it. Raise Conflict with what still uses it.

        NotFound means that it is gone, perhaps by this very request if its first response was lost.
        """
        path = f"/v1/runs/{quote(name, safe='')}"
        return await self._transport.call(DeletedRun, "DELETE", path, seconds=self._upload_seconds)

    async def wait_run_ready(
        self, name: str, deadline_seconds: float, *, step: int = 0, poll_seconds: float = 0.5
    ) -> RunInfo:
        """Wait until the run is ready; raise ChildFailed with its error if it fails or is closed.

        A run that lost steps is waited for until it is at `step` again, or nothing more is trained again.
        """

        def done(run: RunInfo) -> bool:
            if run.state in (RunState.FAILED, RunState.CLOSED, RunState.IDLE, RunState.DAMAGED):
                raise errors.ChildFailed(f"run {name!r} is {run.state}: {run.error or 'no reason given'}")
            return run.state is RunState.READY and (run.step >= step or not run.lost_steps)

        def say(run: RunInfo) -> str:
            wanted, there = (f" at step {step}", f" at step {run.step}") if step else ("", "")
            return f"run {name!r} to be ready{wanted}; it is {run.state}{there}"

        return await self._wait(lambda: self.get_run(name), done, say, deadline_seconds, poll_seconds)

    async def put_adapter(self, adapter: AdapterUpload) -> AdapterReceipt:
        """Upload an adapter for `init_from`. Repeating it is harmless."""
        return await self._transport.call(
            AdapterReceipt,
            "PUT",
            f"/v1/adapters/{adapter.sha256}",
            upload=adapter.chunks,
            headers={"Content-Type": ADAPTER_TYPE, "Content-Length": str(adapter.num_bytes)},
            seconds=self._upload_seconds,
        )

    async def put_group(
        self, group: TrajectoryGroup, inline: Mapping[str, Sequence[ModelCall]] | None = None
    ) -> GroupReceipt:
        """Stream a group's upload. Rollouts in `inline` send their calls instead of naming recorded ones."""
        path = f"/v1/runs/{quote(group.run, safe='')}/groups/{quote(group.id, safe='')}"
        return await self._transport.call(
            GroupReceipt,
            "PUT",
            path,
            upload=lambda: group_lines(group, inline or {}),
            seconds=self._upload_seconds,
        )

    async def get_group(self, run: str, group_id: str) -> GroupInfo:
        """Return a group and its outcome."""
        return await self._transport.call(
            GroupInfo, "GET", f"/v1/runs/{quote(run, safe='')}/groups/{quote(group_id, safe='')}"
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
        body = StepBody(groups=list(group_ids), settings=settings or StepSettings())
        path = f"/v1/runs/{quote(run, safe='')}/steps"
        return await self._transport.call(
            JobInfo, "POST", path, body=body, headers={"Idempotency-Key": idempotency_key}
        )

    async def get_job(self, job_id: str, *, wait_seconds: float = 0.0) -> JobInfo:
        """Return one job: now, or when it ends and after `wait_seconds` at most.

        A backend of an older release does not wait.
        """
        wait = f"?wait_seconds={min(wait_seconds, MAX_WAIT_SECONDS):g}" if wait_seconds else ""
        return await self._transport.call(JobInfo, "GET", f"/v1/jobs/{quote(job_id, safe='')}{wait}")

    async def cancel_job(self, job_id: str) -> JobInfo:
        """Cancel a job: a queued one now, a running one at its next safe point."""
        return await self._transport.call(JobInfo, "POST", f"/v1/jobs/{quote(job_id, safe='')}/cancel")

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
        path = f"/v1/runs/{quote(run, safe='')}/steps?after={after}"
        return (await self._transport.call(StepList, "GET", path)).steps

    async def checkpoints(self, run: str) -> list[CheckpointInfo]:
        """Return the kept checkpoints, oldest first."""
        path = f"/v1/runs/{quote(run, safe='')}/checkpoints"
        return (await self._transport.call(CheckpointList, "GET", path)).checkpoints

    async def download(self, run: str, step: int, file: CheckpointFile, out: BinaryIO) -> None:
        """Write a file of a kept checkpoint to `out`; the manifest has the hashes of the others."""
        await self._transport.download(f"{_checkpoint_path(run, step)}/files/{file}", out)

    async def pin_checkpoint(self, run: str, step: int) -> CheckpointInfo:
        """Keep a checkpoint until it is unpinned, however old it becomes."""
        return await self._transport.call(CheckpointInfo, "PUT", f"{_checkpoint_path(run, step)}/pin")

    async def unpin_checkpoint(self, run: str, step: int) -> CheckpointInfo:
        """Unpin a checkpoint, so that it expires with age again."""
        return await self._transport.call(CheckpointInfo, "DELETE", f"{_checkpoint_path(run, step)}/pin")

    async def delete_checkpoint(self, run: str, step: int) -> None:
        """Delete a checkpoint and its files. Raise Conflict if it is pinned or one of the newest two.

        NotFound means that it is gone, perhaps by this very request if its first response was lost.
        """
        await self._transport.call(CheckpointInfo, "DELETE", _checkpoint_path(run, step))

    async def promotions(self, run: str) -> list[PromotionInfo]:
        """Return every decision about the step that calls to the run's plain name get, oldest first."""
        path = f"/v1/runs/{quote(run, safe='')}/promotions"
        return (await self._transport.call(PromotionList, "GET", path)).promotions

    async def promote(self, run: str, step: int | None) -> PromotionInfo:
        """Give calls to the run's plain name a kept step, or with None the newest one from now on."""
        path = f"/v1/runs/{quote(run, safe='')}/promoted"
        method, path = ("DELETE", path) if step is None else ("PUT", f"{path}/{step}")
        return await self._transport.call(PromotionInfo, method, path)

    async def roll_back(self, run: str, promotion_id: int) -> PromotionInfo:
        """Return to the decision before this one, which must be the last; repeating it is harmless."""
        path = f"/v1/runs/{quote(run, safe='')}/promotions/{promotion_id}/rollback"
        return await self._transport.call(PromotionInfo, "POST", path)

    async def lease(self, run: str, step: int, lease_id: str, *, seconds: float = 60.0) -> LeaseInfo:
        """Take a lease of a kept step (0 is the run's start), or renew it; raise Conflict if it has ended."""
        body = LeaseBody(step=step, seconds=seconds)
        return await self._transport.call(LeaseInfo, "PUT", _lease_path(run, lease_id), body=body)

    async def get_lease(self, run: str, lease_id: str) -> LeaseInfo:
        """Return one lease."""
        return await self._transport.call(LeaseInfo, "GET", _lease_path(run, lease_id))

    async def release(self, run: str, lease_id: str) -> LeaseInfo:
        """End a lease; harmless if it has ended already."""
        return await self._transport.call(LeaseInfo, "DELETE", _lease_path(run, lease_id))

    @asynccontextmanager
    async def leased(
        self, run: str, step: int, *, seconds: float = 60.0, deadline_seconds: float = 3600.0
    ) -> AsyncGenerator[LeaseInfo]:
        """Have a version served inside this block, under the lease's `model`.

        Wait for it at most `deadline_seconds`; raise ChildFailed if it cannot be loaded. If the lease is
        lost, because the backend was restarted or unreachable for `seconds`, the block is cancelled and the
        reason raised.
        """
        lease_id = f"lease-{secrets.token_hex(8)}"
        await self.lease(run, step, lease_id, seconds=seconds)
        try:
            async with ended_by(self._keep_lease(run, step, lease_id, seconds)):
                yield await self._wait_lease(run, lease_id, deadline_seconds)
        finally:
            try:
                async with asyncio.timeout(_LEASE_SECONDS):
                    await self.release(run, lease_id)
            except (errors.Unavailable, TimeoutError) as error:
                log.warning("the lease %s of %s@%d ends by itself: %s", lease_id, run, step, text_of(error))

    async def _wait_lease(self, run: str, lease_id: str, deadline_seconds: float) -> LeaseInfo:
        def done(lease: LeaseInfo) -> bool:
            if lease.state is LeaseState.ENDED:
                raise errors.ChildFailed(f"the lease of {lease.model} has ended: {lease.reason}")
            return lease.state is LeaseState.READY

        def say(lease: LeaseInfo) -> str:
            return f"{lease.model} to be served: {lease.reason}"

        return await self._wait(lambda: self.get_lease(run, lease_id), done, say, deadline_seconds, 0.1)

    async def _keep_lease(self, run: str, step: int, lease_id: str, seconds: float) -> None:
        """Renew the lease until it is lost; raise the reason."""
        loop = asyncio.get_running_loop()
        renewed_at = loop.time()
        while True:
            await asyncio.sleep(seconds / 3)
            try:
                async with asyncio.timeout(max(_LEASE_SECONDS, renewed_at + seconds - loop.time())):
                    await self.lease(run, step, lease_id, seconds=seconds)
                renewed_at = loop.time()
            except errors.Unavailable:
                if loop.time() - renewed_at > seconds:
                    raise
            except TimeoutError:
                raise errors.Unavailable(
                    f"the lease of {run}@{step} could not be renewed for {seconds:g} s",
                    hint=f"check that the backend runs: GET {self._transport.base_url}/health",
                ) from None

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
                    yield None if kind == "end" else read(EventInfo, data)
                    kind, data = "", b""


def _checkpoint_path(run: str, step: int) -> str:
    return f"/v1/runs/{quote(run, safe='')}/checkpoints/{step}"


def _lease_path(run: str, lease_id: str) -> str:
    return f"/v1/runs/{quote(run, safe='')}/leases/{quote(lease_id, safe='')}"
