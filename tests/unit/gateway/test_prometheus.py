"""`GET /metrics` of the gateway, read by Prometheus' own parser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from insitu.exposition import SECONDS, Latencies, Metric, exposition
from tests.unit.gateway.conftest import API, GatewayUnderTest

parser = pytest.importorskip("prometheus_client.parser", reason="pip install prometheus_client")
ROOT = Path(__file__).parents[3]


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by its name and its labels."""
    families = list(parser.text_string_to_metric_families(text))
    assert all(family.type != "unknown" and family.documentation for family in families)
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
    assert len(found) == len(samples), "a sample is there twice"
    return found


async def scraped(gateway: GatewayUnderTest) -> dict[Any, float]:
    async with gateway.session.get(f"{gateway.url}/metrics", headers=API) as got:
        assert got.status == 200
        assert got.headers["content-type"].startswith("text/plain; version=0.0.4")
        return parsed(await got.text())


async def test_calls_tokens_and_latencies_are_counted(gateway: GatewayUnderTest) -> None:
    before = await scraped(gateway)
    assert before["insitu_gateway_models_served", ()] == 3
    _, first, _ = await gateway.post()
    await gateway.stream()
    await gateway.post("/v1/completions", prompt="hello")
    status, _, _ = await gateway.post(model="nothing-like-it")
    assert status == 404
    records = await gateway.records()
    found = await scraped(gateway)
    calls = {labels: value for (name, labels), value in found.items() if name == "insitu_gateway_calls_total"}
    assert calls == {
        (("protocol", "chat"), ("status", "200")): 2,
        (("protocol", "chat"), ("status", "404")): 1,
        (("protocol", "completions"), ("status", "200")): 1,
    }
    assert found["insitu_gateway_call_duration_seconds_count", (("protocol", "chat"),)] == 3
    assert found["insitu_gateway_call_duration_seconds_bucket", (("le", "+Inf"), ("protocol", "chat"))] == 3
    prompt = sum(len(call.prompt_ids) for call in records)
    output = sum(len(call.output_ids) for call in records)
    assert found["insitu_gateway_tokens_total", (("kind", "prompt"),)] == prompt > 0
    assert found["insitu_gateway_tokens_total", (("kind", "output"),)] == output > 0
    assert first["usage"]["completion_tokens"] < output
    assert found["insitu_gateway_calls_recorded_total", ()] == 3 == len(records)
    assert found["insitu_gateway_record_backlog", ()] == 0
    assert found["insitu_gateway_recording", ()] == 1
    assert found["insitu_gateway_replica_healthy", (("replica", "replica-0"),)] == 1


async def test_rejections_are_counted_by_reason(gateway: GatewayUnderTest) -> None:
    status, _, _ = await gateway.post(headers={"Authorization": "Bearer wrong"})
    assert status == 401
    async with gateway.session.get(f"{gateway.url}/metrics") as got:
        assert got.status == 401
    found = await scraped(gateway)
    assert found["insitu_gateway_rejections_total", (("reason", "unauthorized"),)] == 2
    assert found["insitu_gateway_calls_total", (("protocol", "chat"), ("status", "401"))] == 1


def test_labels_are_escaped_and_buckets_add_up() -> None:
    durations = Latencies()
    for seconds in (0.05, 0.051, 1000.0):
        durations.observe(seconds)
    odd = 'a "quoted" \\ name\nof two lines'
    metrics = [
        Metric("odd_total", "counter", "Odd.", [("", {"name": odd}, 1)]),
        Metric("took_seconds", "histogram", "Took.", durations.samples({})),
    ]
    found = parsed(exposition(metrics).decode())
    assert found["odd_total", (("name", odd),)] == 1
    buckets = [found["took_seconds_bucket", (("le", str(bound)),)] for bound in SECONDS]
    assert buckets == [1, *[2] * (len(SECONDS) - 1)]
    assert found["took_seconds_bucket", (("le", "+Inf"),)] == found["took_seconds_count", ()] == 3


def test_names_follow_the_conventions_and_the_page_and_the_board_know_them() -> None:
    sources = [ROOT / "src/insitu/gateway/metrics.py", ROOT / "src/insitu/backend/http/metrics.py"]
    known: dict[str, str] = {}
    for file in sources:
        known |= dict.fromkeys(re.findall(r'"(insitu_\w+)"', file.read_text()), file.name)
    assert len(known) > 20
    text = (ROOT / "docs/monitoring.md").read_text().partition("## Prometheus")[2]
    page = set(re.findall(r"`(insitu_\w+)`", text))
    assert page == set(known)
    board = json.loads((ROOT / "deploy/grafana/insitu.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert queries
    for query in queries:
        names = re.findall(r"insitu_\w+", query)
        assert names, query
        for name in names:
            assert name.removesuffix("_bucket") in known, f"no metric {name}: {query}"
            if name.endswith(("_total", "_bucket")):
                assert re.search(rf"(rate|increase)\({name}\[", query), f"a counter without rate: {query}"


async def test_an_engines_own_metrics_come_without_the_names_of_runs(gateway: GatewayUnderTest) -> None:
    async with gateway.session.get(f"{gateway.url}/engines/replica-0/metrics", headers=API) as got:
        text = await got.text()
        assert (got.status, "vllm:num_requests_waiting{" in text, "secret" in text) == (200, True, False)
    async with gateway.session.get(f"{gateway.url}/engines/none/metrics", headers=API) as got:
        assert (got.status, "GET /health lists those" in await got.text()) == (404, True)
    await gateway.engine.stop()
    async with gateway.session.get(f"{gateway.url}/engines/replica-0/metrics", headers=API) as got:
        assert (got.status, "did not tell its metrics" in await got.text()) == (502, True)
