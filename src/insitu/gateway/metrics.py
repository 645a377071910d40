"""`GET /metrics` of the gateway. Nothing in it names a run or a project."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from insitu.access.strangers import Strangers
from insitu.errors import (
    Forbidden,
    InsituError,
    LimitReached,
    Overloaded,
    TooLarge,
    Unauthorized,
    Unavailable,
)
from insitu.exposition import Metric, counter, gauge, gauges, merged, total
from insitu.gateway.engines.replicas import ReplicaPool
from insitu.gateway.engines.routes import Routes
from insitu.gateway.recording.recorder import Recorder
from insitu.gateway.shared.counts import Counts

_REASONS: dict[type[InsituError], str] = {
    LimitReached: "key_limit",  # before Overloaded, its parent
    Overloaded: "overloaded",
    Unavailable: "unavailable",
    Unauthorized: "unauthorized",
    Forbidden: "forbidden",
    TooLarge: "too_large",
}


def rejection(error: InsituError) -> str | None:
    """Return the reason why a request was not let in; None for an error of another kind."""
    return next((reason for kind, reason in _REASONS.items() if isinstance(error, kind)), None)


def metrics(
    counts: Counts, strangers: Strangers, recorder: Recorder, routes: Routes, pool: ReplicaPool
) -> Iterator[Metric]:
    """Yield everything that is counted, and the state of now."""
    name = "insitu_gateway_calls_total"
    samples = merged(counts.calls, ("protocol", "status"))
    yield Metric(name, "counter", "Model calls that ended, by protocol and status.", samples)
    durations = [
        sample
        for protocol, each in sorted(counts.seconds.items())
        for sample in each.samples({"protocol": protocol})
    ]
    name = "insitu_gateway_call_duration_seconds"
    yield Metric(name, "histogram", "Time from a model call's arrival to its end.", durations)
    yield counter("insitu_gateway_tokens_total", "Tokens of recorded calls.", "kind", counts.tokens)
    text = "Requests that were not let in, by reason."
    rejected = counts.rejected + Counter(unparsed=strangers.num_unparsed)
    yield counter("insitu_gateway_rejections_total", text, "reason", rejected)
    text = "Fields of requests that are unknown here and that no engine got, by protocol."
    yield counter("insitu_gateway_unknown_fields_total", text, "protocol", counts.unknown_fields)
    text = "Streams that ended before their end, by who ended them."
    yield counter("insitu_gateway_streams_broken_total", text, "by", counts.broken_streams)
    text = "Shortcuts that differed from the engine's own result and are no longer used."
    yield counter("insitu_gateway_shortcuts_ended_total", text, "shortcut", counts.shortcuts_ended)
    text = "Calls that were written to the records."
    yield total("insitu_gateway_calls_recorded_total", text, recorder.num_recorded)
    yield total("insitu_gateway_calls_lost_total", "Calls that the records did not take.", recorder.num_lost)
    yield gauge("insitu_gateway_record_backlog", "Calls not yet in the records.", recorder.backlog)
    text = "1 while calls can be recorded; 0 on a full disk, for example."
    yield gauge("insitu_gateway_recording", text, recorder.refusal() is None)
    yield gauge("insitu_gateway_calls_in_flight", "Calls under way.", routes.in_flight.total())
    yield gauge("insitu_gateway_calls_held", "Calls that wait for a training step.", routes.held)
    served = routes.table.names() if routes.table is not None else []
    yield gauge("insitu_gateway_models_served", "Names that a client may call now.", len(served))
    healthy = {replica.id: float(replica.healthy) for replica in pool.replicas.values()}
    yield gauges("insitu_gateway_replica_healthy", "1 for an engine that answers.", "replica", healthy)
    text = "Calls that left their rollout's replica because it was loaded."
    yield total("insitu_gateway_spilled_total", text, pool.num_spilled)
