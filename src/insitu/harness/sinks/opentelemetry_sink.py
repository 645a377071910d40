"""OpenTelemetry: a trace for each rollout with a span for each of its model calls, as OTLP in JSON over HTTP.

    rollout (reward, ending, example)
      ├─ chat adder   (tokens, finish reason, version of the weights)
      └─ chat adder

The address and headers are in OpenTelemetry's own variables. The spans of calls follow its conventions for
generative models. Ids are derived from those of rollouts and calls, so that what is sent twice is one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from urllib.parse import unquote

from insitu.errors import InvalidRequest, UpstreamError
from insitu.harness.rollouts.recorded_call import RecordedCall
from insitu.harness.sinks.otlp import CLIENT, Span, post, span_id, trace_id, traces
from insitu.harness.sinks.sink import RunStart, SentRollout, Sink
from insitu.json_values import as_object
from insitu.plugins import ComponentConfig, Parts

_DEFAULT = "http://localhost:4318"
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HEADERS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
_OPERATIONS = {"completions": "text_completion"}
"""Names of the conventions for a call's protocol; every other one is a chat."""


class OpentelemetryConfig(ComponentConfig):
    """An entry of `sinks` of the type `opentelemetry`."""

    with_texts: bool = False
    """Send the rollout's input and output, too. They may be personal data."""


class OpentelemetrySink(Sink):
    """Sends rollouts and their calls, not figures of steps."""

    takes_rollouts = True

    def __init__(self, config: OpentelemetryConfig, parts: Parts) -> None:  # noqa: ARG002 - as every component
        self._config = config
        self._url = _address()
        self._headers = _given_headers()
        self._run: RunStart | None = None

    def start(self, run: RunStart) -> str:
        """Remember the run; its spans have its id."""
        self._run = run
        return run.run_id

    def rollouts(self, rollouts: Sequence[SentRollout]) -> None:
        """Send the spans of a batch of rollouts."""
        assert self._run is not None
        resource = {
            **_pairs("OTEL_RESOURCE_ATTRIBUTES"),
            "service.name": os.environ.get("OTEL_SERVICE_NAME") or "insitu",
        }
        spans = [span for each in rollouts for span in self._spans(each, self._run)]
        answer = as_object(post(self._url, traces(spans, resource), self._headers)) or {}
        partial = as_object(answer.get("partialSuccess")) or {}
        if rejected := int(str(partial.get("rejectedSpans") or 0)):
            raise UpstreamError(f"{self._url} rejected {rejected} spans: {partial.get('errorMessage')}")

    def _spans(self, sent: SentRollout, run: RunStart) -> Iterator[Span]:
        rollout, details = sent.rollout, sent.rollout.details()
        trace = trace_id(rollout.rollout_id)
        texts = self._config.with_texts
        yield Span(
            trace,
            trace[:16],
            f"rollout {run.name}",
            rollout.started_at or time.time(),
            rollout.seconds or 0.0,
            {
                "insitu.run.id": run.run_id,
                "insitu.run.name": run.name,
                "insitu.store": sent.store,
                "insitu.rollout.id": rollout.rollout_id,
                "insitu.example.id": rollout.example_id,
                "insitu.generation": rollout.generation,
                "insitu.ending": str(rollout.ending),
                "insitu.reward": rollout.reward,
                **{f"insitu.reward.{name}": each for name, each in rollout.figures.components.items()},
                "insitu.input": details.input if texts else None,
                "insitu.output": details.output if texts else None,
            },
            error=rollout.reason if rollout.failed else "",
        )
        for call in details.calls:
            yield _call_span(call, trace)


def _call_span(call: RecordedCall, trace: str) -> Span:
    operation = _OPERATIONS.get(call.get("protocol", "chat"), "chat")
    sampling = call.get("sampling") or {}
    return Span(
        trace,
        span_id(call["id"]),
        f"{operation} {call['model']}",
        call.get("started_at", 0.0),
        call.get("timings", {}).get("total", 0.0),
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "insitu",
            "gen_ai.request.model": call["model"],
            "gen_ai.response.model": call["policy_version"],
            "gen_ai.response.id": call["id"],
            "gen_ai.response.finish_reasons": [call["finish_reason"]],
            "gen_ai.usage.input_tokens": call["num_prompt_tokens"],
            "gen_ai.usage.output_tokens": call["num_output_tokens"],
            "gen_ai.request.temperature": sampling.get("temperature"),
            "gen_ai.request.max_tokens": sampling.get("max_tokens"),
            "insitu.policy.step": call["policy_step"],
            "insitu.function": call.get("function"),
        },
        parent=trace[:16],
        kind=CLIENT,
        lists=frozenset({"gen_ai.response.finish_reasons"}),
    )


def _address() -> str:
    """Return where traces go, by OpenTelemetry's own variables."""
    for name in _PROTOCOLS:
        if (protocol := os.environ.get(name, "")) == "grpc":
            raise InvalidRequest(
                f"{name} is {protocol!r}; the sink `opentelemetry` speaks OTLP over HTTP",
                hint=f"export {name}=http/json, and {_ENDPOINT} with the collector's HTTP port, usually 4318",
            )
    name, url = _TRACES_ENDPOINT, os.environ.get(_TRACES_ENDPOINT, "")
    if not url:
        name = _ENDPOINT
        url = (os.environ.get(_ENDPOINT) or _DEFAULT).rstrip("/") + "/v1/traces"
    if not url.startswith(("https://", "http://")):
        raise InvalidRequest(f"{name} gives {url!r}, not an HTTP address", hint=f"such as {_DEFAULT}")
    return url


def _given_headers() -> dict[str, str]:
    return {key: value for name in _HEADERS for key, value in _pairs(name).items()}


def _pairs(name: str) -> dict[str, str]:
    """Read `key=value,key=value`, with percent signs in the values."""
    entries = [entry.partition("=") for entry in os.environ.get(name, "").split(",") if entry.strip()]
    if wrong := [key for key, equals, _ in entries if not equals]:
        raise InvalidRequest(f"{name} has {wrong[0]!r} without `=`", hint="such as key=value,other=value")
    return {key.strip(): unquote(value.strip()) for key, _, value in entries}
