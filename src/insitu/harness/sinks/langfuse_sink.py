"""Langfuse: a trace for each rollout, with its reward as a score, over its HTTP API.

    POST /api/public/otel/v1/traces   spans as OTLP in JSON, a rollout each
    POST /api/public/ingestion        scores

The keys are in LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY, the address in LANGFUSE_BASE_URL. Ids are derived
from the rollout's, so that a trace sent twice is one.
"""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from insitu.errors import InvalidRequest, UpstreamError
from insitu.harness.sinks.otlp import Span, post, trace_id, traces
from insitu.harness.sinks.sink import RunStart, SentRollout, Sink
from insitu.json_values import JsonObject, JsonValue, as_list, as_object
from insitu.plugins import ComponentConfig, Parts

CLOUD = "https://cloud.langfuse.com"
_TAGS = "langfuse.trace.tags"


class LangfuseConfig(ComponentConfig):
    """An entry of `sinks` of the type `langfuse`."""

    environment: str | None = None
    """The environment in Langfuse; None: its default one."""


class LangfuseSink(Sink):
    """Sends rollouts, not figures of steps."""

    takes_rollouts = True

    def __init__(self, config: LangfuseConfig, parts: Parts) -> None:  # noqa: ARG002 - as every component
        self._config = config
        values = os.environ
        keys = [values.get(name, "") for name in ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY")]
        self._url = (values.get("LANGFUSE_BASE_URL") or values.get("LANGFUSE_HOST") or CLOUD).rstrip("/")
        if not all(keys):
            raise InvalidRequest(
                f"the sink `langfuse` has no keys for {self._url}",
                hint="export LANGFUSE_PUBLIC_KEY=… and LANGFUSE_SECRET_KEY=…",
            )
        if not self._url.startswith(("https://", "http://")):
            raise InvalidRequest(
                f"LANGFUSE_BASE_URL is {self._url!r}, not an HTTP address", hint=f"such as {CLOUD}"
            )
        self._key = base64.b64encode(":".join(keys).encode()).decode()
        self._run: RunStart | None = None

    def start(self, run: RunStart) -> str:
        """Remember the run; its traces have its id as their session."""
        self._run = run
        return run.run_id

    def rollouts(self, rollouts: Sequence[SentRollout]) -> None:
        """Send a batch of traces, then their scores."""
        assert self._run is not None
        body = traces([self._span(each, self._run) for each in rollouts], {"service.name": "insitu"})
        self._post("/api/public/otel/v1/traces", body, {"x-langfuse-ingestion-version": "4"})
        batch: list[JsonValue] = [score for each in rollouts for score in self._scores(each)]
        if batch:
            answer = as_object(self._post("/api/public/ingestion", {"batch": batch}, {})) or {}
            if errors := as_list(answer.get("errors")):
                raise UpstreamError(f"Langfuse rejected {len(errors)} scores: {errors[0]}")

    def _span(self, sent: SentRollout, run: RunStart) -> Span:
        rollout, details = sent.rollout, sent.rollout.details()
        began = rollout.started_at or time.time()
        metadata: dict[str, object] = {
            "run": run.run_id,
            "model": run.name,
            "rollout_id": rollout.rollout_id,
            "example_id": rollout.example_id,
            "generation": rollout.generation,
            "ending": str(rollout.ending),
            "reason": rollout.reason,
            "num_calls": rollout.figures.num_calls,
            "num_output_tokens": rollout.figures.num_output_tokens,
        }
        values: dict[str, object] = {
            "langfuse.trace.name": f"{run.name} {sent.store}",
            _TAGS: [sent.store, str(rollout.ending)],
            "session.id": run.run_id,
            "langfuse.trace.input": details.input,
            "langfuse.trace.output": details.output,
            "langfuse.observation.input": details.input,
            "langfuse.observation.output": details.output,
            "langfuse.environment": self._config.environment,
            **{f"langfuse.trace.metadata.{name}": value for name, value in metadata.items()},
        }
        trace, name = trace_id(rollout.rollout_id), f"{run.name} {sent.store}"
        seconds = rollout.seconds or 0.0
        return Span(trace, trace[:16], name, began, seconds, values, lists=frozenset({_TAGS}))

    def _scores(self, sent: SentRollout) -> Iterator[JsonObject]:
        rollout = sent.rollout
        scores = {f"reward/{name}": value for name, value in rollout.figures.components.items()}
        if rollout.reward is not None:
            scores["reward"] = rollout.reward
        now = datetime.now(UTC).isoformat()
        for name, value in scores.items():
            score = hashlib.sha256(f"{rollout.rollout_id}/{name}".encode()).hexdigest()[:32]
            body: JsonObject = {
                "id": score,
                "traceId": trace_id(rollout.rollout_id),
                "name": name,
                "value": value,
                "dataType": "NUMERIC",
            }
            if self._config.environment is not None:
                body["environment"] = self._config.environment
            yield {"id": score, "type": "score-create", "timestamp": now, "body": body}

    def _post(self, path: str, body: JsonObject, headers: Mapping[str, str]) -> JsonValue:
        return post(self._url + path, body, {"Authorization": f"Basic {self._key}", **headers})
