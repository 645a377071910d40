"""Routes for jobs: state, events, cancellation."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from insitu.backend.api.events import admit, parse_last_event_id, stream_events, until_ended
from insitu.backend.api.requests import new_router
from insitu.backend.api.responses import shown
from insitu.backend.api.security import Sender, holder_of
from insitu.backend.api.settings import Services
from insitu.backend.ledger.jobs import unknown_job
from insitu.wire.answers import MAX_WAIT_SECONDS, JobInfo


async def _own_job(
    request: Request, sender: Sender, job_id: Annotated[str, Path(pattern=r"^job-[0-9a-f]{16}$")]
) -> str:
    if sender.name is not None:
        job = await run_in_threadpool(request.app.state.services.ledger.get_job, job_id)
        if not sender.owns(job.run):
            raise unknown_job(job_id)
    return job_id


JobId = Annotated[str, Depends(_own_job)]
"""The job that a path names. One of another project is answered as one that does not exist."""


def job_routes(services: Services) -> APIRouter:
    """Build the router."""
    ledger = services.ledger
    router = new_router("jobs")

    @router.get("/jobs/{job_id}")
    async def get_job(
        job_id: JobId, sender: Sender, wait_seconds: Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS)] = 0
    ) -> JobInfo:
        """State, progress and metrics of one job: now, or when it ends and after `wait_seconds` at most."""
        return shown(sender, JobInfo.of(await until_ended(services, job_id, wait_seconds)))

    @router.post("/jobs/{job_id}/cancel")
    def cancel_job(job_id: JobId, sender: Sender) -> JobInfo:
        """Cancel a job and free its groups; a running one ends at its next safe point, in phase `cancelling`
        until then. Repeating it is harmless.
        """
        return shown(sender, JobInfo.of(ledger.cancel_job(job_id)))

    @router.get(
        "/jobs/{job_id}/events",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}}},
    )
    async def watch_job(
        request: Request, job_id: JobId, last_event_id: Annotated[str | None, Header()] = None
    ) -> StreamingResponse:
        """The job's events until it ends. Resume with `Last-Event-ID`."""
        seq = parse_last_event_id(last_event_id)
        await run_in_threadpool(ledger.get_job, job_id)
        holder = await holder_of(request)
        admit(services, holder)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(
            stream_events(services, job_id, seq, holder), media_type="text/event-stream", headers=headers
        )

    return router
