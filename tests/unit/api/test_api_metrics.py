"""`GET /metrics` of the API, read by Prometheus' own parser."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from insitu.backend.http.metrics import StepCount
from insitu.backend.ledger import Ledger
from tests.unit.api.conftest import inline_group, put, submit
from tests.unit.gateway.test_prometheus import parsed


async def test_jobs_requests_and_the_disk_are_counted(http, stranger, ledger: Ledger, tmp_path: Path):
    assert (await stranger.get("/metrics")).status_code == 401
    first = parsed((await http.get("/metrics")).text)
    assert first["insitu_ready", ()] == 0
    assert first["insitu_jobs", (("state", "queued"),)] == 0
    assert first["insitu_job_queue_wait_seconds", ()] == 0
    await http.post("/v1/runs", json={"name": "run", "base_model": "tiny"})
    assert (await put(http, "g", inline_group())).status_code in (200, 201)
    assert (await submit(http, "key", ["g"])).status_code in (200, 201, 202)
    (tmp_path / "status.json").write_text('{"state": "ready", "replicas": {"replica-0": {"joined": true}}}')
    time.sleep(0.01)
    answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = parsed(answer.text)
    assert found["insitu_jobs", (("state", "queued"),)] == 1
    assert 0 < found["insitu_job_queue_wait_seconds", ()] < 60
    assert found["insitu_steps_committed_total", ()] == 0
    assert found["insitu_engines_joined", ()] == 1
    assert 0 < found["insitu_state_disk_free_bytes", ()] < found["insitu_state_disk_size_bytes", ()]
    assert found["insitu_api_requests_total", (("method", "GET"), ("status", "401"))] == 1
    assert found["insitu_api_request_duration_seconds_count", ()] == 5
    assert "run" not in {value for _, labels in found for _, value in labels}


def test_a_deleted_run_does_not_turn_the_counter_back() -> None:
    steps = StepCount()
    assert [steps.at(now) for now in (5, 7, 2, 4)] == [5, 7, 7, 9]


@pytest.mark.parametrize("method", ["PATCH", "MADEUP"])
async def test_a_made_up_method_makes_no_metric(http, method: str):
    await http.request(method, "/metrics")
    found = parsed((await http.get("/metrics")).text)
    assert not [labels for _, labels in found if ("method", method) in labels]
    assert any(("method", "other") in labels for _, labels in found)
