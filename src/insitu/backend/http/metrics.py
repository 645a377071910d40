"""`GET /metrics` of the API: jobs, steps, engines and the disk. Nothing in it names a run or a project."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator

from fastapi import APIRouter, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from insitu.access.strangers import Strangers
from insitu.backend.api.health import against, read_status
from insitu.backend.api.settings import Services
from insitu.exposition import CONTENT_TYPE, Latencies, Metric, exposition, gauge, gauges, merged, total
from insitu.json_values import as_object


class RequestCounts:
    """Requests of the API by method and status, and their durations."""

    def __init__(self, strangers: Strangers) -> None:
        self.strangers = strangers
        self.requests: Counter[tuple[str, str]] = Counter()
        self.seconds = Latencies()


class CountedRequests:
    """ASGI middleware that counts requests."""

    def __init__(self, app: ASGIApp, counts: RequestCounts) -> None:
        self._app, self._counts = app, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and count it when it ends."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), "none"

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            # A client may make up a method: it must not make up a metric.
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._counts.requests[method, status] += 1
            self._counts.seconds.observe(time.monotonic() - began)


class StepCount:
    """The steps committed so far: deleted runs take theirs out of the ledger, but a counter never falls."""

    def __init__(self) -> None:
        self._last = self._total = 0

    def at(self, now: int) -> int:
        """Return the total, given the number of steps in the ledger now."""
        self._total += max(0, now - self._last)
        self._last = now
        return self._total


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE"})


def metrics_routes(services: Services, version: str, counts: RequestCounts) -> APIRouter:
    """Build the router of `GET /metrics`."""
    router = APIRouter(tags=["health"])
    steps = StepCount()

    @router.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}, "description": "Metrics for Prometheus"}},
    )
    def metrics() -> Response:
        """Return counters and the state of now, in the text format of Prometheus."""
        content = exposition(_metrics(services, version, counts, steps))
        return Response(content, headers={"content-type": CONTENT_TYPE})

    return router


def _metrics(services: Services, version: str, counts: RequestCounts, steps: StepCount) -> Iterator[Metric]:
    found, directory = services.ledger.count(), services.settings.state_dir
    yield gauges("insitu_info", "1; the release is in the label.", "version", {version: 1})
    text = "Requests of the API, by method and status."
    samples = merged(counts.requests, ("method", "status"))
    yield Metric("insitu_api_requests_total", "counter", text, samples)
    text = "Requests of a flood without a key, rejected unparsed."
    yield total("insitu_api_unparsed_total", text, counts.strangers.num_unparsed)
    name, text = "insitu_api_request_duration_seconds", "Time from a request's arrival to its end."
    yield Metric(name, "histogram", text, counts.seconds.samples({}))
    yield gauges("insitu_jobs", "Training jobs in the ledger, by state.", "state", found.jobs)
    waits = 0.0 if found.oldest_queued_at is None else max(0.0, time.time() - found.oldest_queued_at)
    yield gauge("insitu_job_queue_wait_seconds", "How long the oldest queued job has waited.", waits)
    yield total(
        "insitu_steps_committed_total", "Training steps that were committed.", steps.at(found.num_steps)
    )
    disk = shutil.disk_usage(directory)
    yield gauge("insitu_state_disk_free_bytes", "Free space of the state directory's disk.", disk.free)
    yield gauge("insitu_state_disk_size_bytes", "Size of the state directory's disk.", disk.total)
    view, age = read_status(directory / "status.json")
    yield gauge("insitu_ready", "1 while calls and steps can be sent.", not against(view, age))
    if age is not None:
        yield gauge("insitu_supervisor_report_age_seconds", "Age of the supervisor's report.", age)
    engines = [as_object(each) or {} for each in (as_object((view or {}).get("replicas")) or {}).values()]
    joined = sum(engine.get("joined") is True for engine in engines)
    yield gauge("insitu_engines_joined", "Engines that take calls.", joined)
    waiting = (view or {}).get("waiting") is not None
    yield gauge(
        "insitu_training_waiting", "1 while training waits, for space on the disk for example.", waiting
    )
