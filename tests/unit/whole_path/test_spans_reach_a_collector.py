"""`insitu finetune` with the sink `opentelemetry`: spans of rollouts and calls, as a collector reads them."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest

from insitu.errors import InvalidRequest
from insitu.harness.sinks.opentelemetry_sink import OpentelemetryConfig, OpentelemetrySink
from insitu.harness.sinks.otlp import span_id, trace_id
from tests.support.finetune_bench import FinetuneBench, agent, by_generation, one_call, open_bench, rewards
from tests.support.recording_server import RecordingServer

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "HEADERS", "TRACES_HEADERS", "PROTOCOL", "TRACES_PROTOCOL"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)


def configure(bench: FinetuneBench, **settings: Any) -> None:
    bench.project.configure(
        workflow=agent(one_call),
        eval=rewards(by_generation),
        trajectory_builders={"groups": {"num_generations": 2}},
        finetuning={"num_epochs": 1, "groups_per_step": 2},
        sinks=[{"_type": "opentelemetry", **settings}],
    )


def spans_of(server: RecordingServer) -> list[dict[str, Any]]:
    bodies = server.bodies("/v1/traces")
    return [span for body in bodies for span in body["resourceSpans"][0]["scopeSpans"][0]["spans"]]


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {each["key"]: next(iter(each["value"].values())) for each in span["attributes"]}


async def test_a_rollout_is_a_trace_and_each_call_a_span(tmp_path, monkeypatch):
    server = RecordingServer()
    monkeypatch.setenv(ENDPOINT, server.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=a%20b,authorization=Bearer secret")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=staging")
    async with open_bench(tmp_path, monkeypatch, num_examples=4) as bench:
        configure(bench)
        summary = await bench.run()
        names = ["epoch-0000-step-0000", "epoch-0000-step-0001"]
        records = {each["rollout_id"]: each for name in names for each in bench.records(name)}
    await asyncio.to_thread(server.close)
    spans = spans_of(server)
    roots = {span["traceId"]: span for span in spans if "parentSpanId" not in span}
    assert len(roots) == len(records) == 8
    calls = {span["spanId"]: span for span in spans if "parentSpanId" in span}
    assert len(calls) == sum(len(record["calls"]) for record in records.values()) == 8
    for rollout_id, record in records.items():
        root, values = roots[trace_id(rollout_id)], attributes(roots[trace_id(rollout_id)])
        assert values["insitu.reward"] == record["reward"]
        assert values["insitu.run.id"] == summary.run_id
        assert "insitu.output" not in values, "texts are sent if asked for"
        for call in record["calls"]:
            span = calls[span_id(call["id"])]
            assert (span["traceId"], span["parentSpanId"]) == (root["traceId"], root["spanId"])
            told = attributes(span)
            assert told["gen_ai.usage.output_tokens"] == str(len(call["output_ids"]))
            reasons = told["gen_ai.response.finish_reasons"]["values"]
            assert reasons == [{"stringValue": call["finish_reason"]}]
            assert told["gen_ai.response.model"] == call["policy_version"]
            assert int(span["startTimeUnixNano"]) == int(call["started_at"] * 1e9)
            assert int(span["endTimeUnixNano"]) >= int(span["startTimeUnixNano"]) > 1e18
    headers = server.got[0][1]
    assert (headers["X-Team"], headers["Authorization"]) == ("a b", "Bearer secret")
    resource = attributes(server.got[0][2]["resourceSpans"][0]["resource"])
    assert resource == {"deployment.environment": "staging", "service.name": "insitu"}


async def test_texts_are_sent_if_asked_for_and_rejected_spans_are_counted(tmp_path, monkeypatch):
    server = RecordingServer(answer={"partialSuccess": {"rejectedSpans": "3", "errorMessage": "too old"}})
    monkeypatch.setenv(ENDPOINT, server.url + "/")
    async with open_bench(tmp_path, monkeypatch, num_examples=4) as bench:
        configure(bench, with_texts=True)
        summary = await bench.run()
        [record] = [each for each in bench.records("epoch-0000-step-0000") if each["generation"] == 0][:1]
    await asyncio.to_thread(server.close)
    assert summary.outcome == "succeeded"
    [root] = [each for each in spans_of(server) if each["spanId"] == trace_id(record["rollout_id"])[:16]]
    assert attributes(root)["insitu.output"] == record["output"]
    assert any("rejected 3 spans: too old" in line for line in bench.progress.said)


async def test_a_collector_reads_it(tmp_path, monkeypatch):
    """Parsed by OpenTelemetry's own messages. OTLP has ids in hexadecimal, protobuf's JSON in base64."""
    json_format = pytest.importorskip("google.protobuf.json_format")
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    server = RecordingServer()
    monkeypatch.setenv(ENDPOINT, server.url)
    async with open_bench(tmp_path, monkeypatch, num_examples=4) as bench:
        configure(bench)
        await bench.run()
    await asyncio.to_thread(server.close)
    num_read = 0
    for body in server.bodies("/v1/traces"):
        for span in body["resourceSpans"][0]["scopeSpans"][0]["spans"]:
            for name in {"traceId", "spanId", "parentSpanId"} & span.keys():
                span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
        read = json_format.Parse(json.dumps(body), service.ExportTraceServiceRequest())
        for span in read.resource_spans[0].scope_spans[0].spans:
            assert (len(span.trace_id), len(span.span_id)) == (16, 8)
            num_read += 1
    assert num_read == 16


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (ENDPOINT, "collector:4318", "not an HTTP address"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "speaks OTLP over HTTP"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "key", "has 'key' without `=`"),
    ],
)
def test_a_variable_that_cannot_be_honoured_is_rejected(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidRequest, match=says):
        OpentelemetrySink(OpentelemetryConfig(_type="opentelemetry"), parts=None)  # pyright: ignore
