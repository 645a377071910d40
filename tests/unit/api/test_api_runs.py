from __future__ import annotations

import asyncio
import dataclasses

import pytest
from sqlalchemy import select, update

from insitu.backend.ledger import Checkpoint, Job, Ledger, Run, Step, schema
from insitu.types import JobState, StepSettings
from insitu.wire.answers import CheckpointInfo, JobInfo, RunInfo, StepInfo

from .conftest import inline_group, put, submit


@pytest.mark.parametrize(
    ("row", "view", "hidden"),
    [
        (Run, RunInfo, {"seen_at", "done_at"}),
        (Job, JobInfo, {"idempotency_key"}),
        (Step, StepInfo, set()),
        (Checkpoint, CheckpointInfo, set()),
    ],
)
def test_views_show_every_field_of_the_rows(row, view, hidden):
    assert {field.name for field in dataclasses.fields(row)} - hidden == {
        field.name for field in dataclasses.fields(view)
    }


async def test_registration_is_idempotent_and_differences_are_said(http):
    body = {"name": "new", "base_model": "m", "project": "p", "lora": {"rank": 4}, "engine_args": {"a": 1}}
    first = await http.post("/v1/runs", json=body)
    lora = {"rank": 4, "alpha": 16, "seed": 0, "target_modules": None}
    assert (first.status_code, first.json()["lora"]) == (200, lora)
    assert (await http.post("/v1/runs", json=body)).json() == first.json()
    assert (await http.get("/v1/runs/new")).json() == first.json()
    assert [run["name"] for run in (await http.get("/v1/runs")).json()["runs"]] == ["run", "new"]
    other = await http.post("/v1/runs", json=body | {"engine_args": {"a": 2}})
    assert other.status_code == 409
    assert "engine_args is {'a': 1}, asked {'a': 2}" in other.json()["error"]["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"name": "Upper"},
        {"name": "../x"},
        {"name": "a" * 65},
        {"name": "x\n"},
        {"name": ""},
        {"project": "a/b"},
        {"base_model": ""},
        {"base_model": "a\x00b"},
        {"unknown": 1},
        {"lora": {"rank": 0}},
        {"lora": {"rank": 8.5}},
        {"lora": {"rank": "8"}},
        {"lora": {"rank": True}},
        {"lora": {"target": "all"}},
        {"engine_args": {"A": 1}},
        {"engine_args": {"x": {"command": "sh"}}},
        {"engine_args": {f"a{n}": 1 for n in range(65)}},
        {"init_args": [1]},
    ],
)
async def test_wrong_registrations_are_refused(http, change):
    answer = await http.post("/v1/runs", json={"name": "new", "base_model": "m"} | change)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"type", "message", "hint"}
    assert error["type"] == "InvalidRequest"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"name": "new", "base_model": "\xff"}',
        b'{"name": "new", "base_model": "m", "engine_args": {"x": NaN}}',
        b'{"name": "new", "base_model": "m", "engine_args": {"x": Infinity}}',
        b'{"name": "new", "base_model": "m", "engine_args": {"x": 1e999}}',
        b'{"name": "new", "base_model": "m", "engine_args": {"__proto__": 1}}',
        b"[" * 100_000,
        b'{"name":' * 5_000,
    ],
)
async def test_bad_json_is_the_callers_fault(http, content: bytes):
    answer = await http.post("/v1/runs", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 413), answer.text
    assert answer.json()["error"]["type"] in ("InvalidRequest", "TooLarge")


async def test_large_bodies_are_refused(http):
    body = {"name": "new", "base_model": "m", "engine_args": {"x": "y" * 70_000}}
    answer = await http.post("/v1/runs", json=body)
    assert answer.status_code == 413
    assert "65536" in answer.json()["error"]["message"]


async def test_closing(http):
    assert (await http.post("/v1/runs/run/close")).json()["state"] == "closed"
    assert (await http.post("/v1/runs/run/close")).json()["state"] == "closed"
    assert (await put(http, "g", inline_group())).status_code == 409


async def test_a_step_is_a_job_once(http, ledger: Ledger):
    await put(http, "g", inline_group())
    first = await submit(http, "key", ["g"], learning_rate=1e-3)
    assert first.status_code == 202
    job = first.json()
    assert (job["state"], job["settings"]["learning_rate"], job["group_ids"]) == ("queued", 1e-3, ["g"])
    again = await submit(http, "key", ["g"], learning_rate=0.001)
    assert again.json() == job
    other = await submit(http, "key", ["g"], learning_rate=1e-4)
    assert other.status_code == 409
    assert (await http.get(f"/v1/jobs/{job['id']}")).json() == job
    assert ledger.get_job(job["id"]).settings == StepSettings(learning_rate=1e-3)


async def test_fifty_concurrent_duplicates_are_one_job(http, ledger: Ledger):
    await put(http, "g", inline_group())
    answers = await asyncio.gather(*(submit(http, "key", ["g"]) for _ in range(50)))
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["id"] for answer in answers}) == 1
    (job,) = ledger.next_jobs()
    ledger.transition_job(job.id, JobState.RUNNING)
    assert ledger.next_jobs() == []


@pytest.mark.parametrize(
    "body",
    [
        {"groups": []},
        {"groups": "g"},
        {"groups": ["../g"]},
        {},
        {"groups": ["g"], "settings": {"learning_rate": -1}},
        {"groups": ["g"], "settings": {"learning_rate": "1e-3"}},
        {"groups": ["g"], "settings": {"clip_low": 0}},
        {"groups": ["g"], "settings": {"max_grad_norm": 0}},
        {"groups": ["g"], "settings": {"lr": 1e-3}},
        {"groups": ["g"], "more": 1},
        {"groups": ["g", "g"]},
    ],
)
async def test_wrong_steps_are_refused(http, body):
    await put(http, "g", inline_group())
    answer = await http.post("/v1/runs/run/steps", json=body, headers={"Idempotency-Key": "k"})
    assert answer.status_code == 400, answer.text


async def test_a_step_needs_its_key_run_and_groups(http):
    await put(http, "g", inline_group())
    assert (await http.post("/v1/runs/run/steps", json={"groups": ["g"]})).status_code == 400
    headers = {"Idempotency-Key": "a b"}
    assert (await http.post("/v1/runs/run/steps", json={"groups": ["g"]}, headers=headers)).status_code == 400
    assert (await submit(http, "k", ["nope"])).status_code == 404
    assert (await submit(http, "k", ["g"])).status_code == 202
    taken = await submit(http, "k2", ["g"])
    assert taken.status_code == 409
    assert "'g'" in taken.json()["error"]["message"]


async def test_cancel_frees_the_groups(http, ledger: Ledger):
    await put(http, "g", inline_group())
    job = (await submit(http, "k", ["g"])).json()["id"]
    assert (await http.post(f"/v1/jobs/{job}/cancel")).json()["state"] == "cancelled"
    assert (await http.post(f"/v1/jobs/{job}/cancel")).json()["state"] == "cancelled"
    second = (await submit(http, "k2", ["g"])).json()["id"]
    ledger.transition_job(second, JobState.RUNNING)
    asked = (await http.post(f"/v1/jobs/{second}/cancel")).json()
    assert (asked["state"], asked["phase"]) == ("running", "cancelling")
    ledger.transition_job(second, JobState.CANCELLED)
    third = (await submit(http, "k3", ["g"])).json()["id"]
    ledger.transition_job(third, JobState.RUNNING)
    ledger.commit_step(third, 1, {"loss": 1.0}, "path", "sha")
    assert (await http.post(f"/v1/jobs/{third}/cancel")).status_code == 409
    steps = (await http.get("/v1/runs/run/steps")).json()["steps"]
    assert [(step["step"], step["job_id"], step["metrics"]) for step in steps] == [(1, third, {"loss": 1.0})]
    assert (await http.get("/v1/runs/run/steps?after=1")).json() == {"steps": []}
    kept = (await http.get("/v1/runs/run/checkpoints")).json()["checkpoints"]
    assert [(c["step"], c["path"], c["manifest_sha256"]) for c in kept] == [(1, "path", "sha")]
    assert (await http.get("/v1/runs/run/groups/g")).json()["state"] == "consumed"


@pytest.mark.parametrize(
    "path",
    ["/v1/runs/nope", "/v1/runs/run/groups/nope", f"/v1/jobs/job-{'0' * 16}", "/v1/runs/nope/steps", "/v1/x"],
)
async def test_what_is_not_there_is_not_found(http, path: str):
    answer = await http.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "NotFound"


async def test_openapi_describes_routes_and_upload_lines(http):
    document = (await http.get("/v1/openapi.json")).json()
    assert "/v1/runs/{name}/steps" in document["paths"]
    assert {"GroupLine", "TrajectoryHead", "InlineCall", "ErrorBody"} <= set(
        document["components"]["schemas"]
    )


async def test_a_failure_inside_says_nothing_private(http, ledger: Ledger, monkeypatch):
    def broken():
        raise RuntimeError("secret-value")

    monkeypatch.setattr(ledger, "list_runs", broken)
    answer = await http.get("/v1/runs")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "GET /v1/runs failed inside the server: RuntimeError"


async def test_a_request_is_known_again_after_an_update(http, ledger: Ledger):
    """The hash of a request, and the settings in the ledger, are those of the releases before."""
    await put(http, "g", inline_group())
    given = {"learning_rate": 1, "beta": 0.04, "clip_high": 0.28, "num_passes": 2, "max_sampler_weight": None}
    job = (await submit(http, "key", ["g"], **given)).json()
    with ledger._engine.connect() as connection:
        row = connection.execute(select(schema.jobs)).mappings().one()
    assert row["request_hash"] == "64a7422b75289b66ee86d5f9fb4a786258e54bc47b0676859dc70aed3798a6de"
    defaults = {
        "loss": "dapo",
        "advantage": None,
        "clip_low": None,
        "reference_step": None,
        "entropy_bonus": 0.0,
    }
    defaults |= {"mask_truncated": True, "mask_constrained": False, "max_staleness": 4}
    defaults |= {"max_rollout_tokens": None, "max_grad_norm": 1.0}
    newer = ("adam_beta2", "overlong_tokens", "overlong_buffer", "overlong_penalty")
    defaults |= dict.fromkeys((*newer, "min_reward", "dpo_beta", "teacher")) | {"method": "grpo"}
    assert row["settings"] == job["settings"] == defaults | given


async def test_stored_settings_out_of_todays_range_are_still_shown(http, ledger: Ledger):
    await put(http, "g", inline_group())
    job = (await submit(http, "key", ["g"])).json()
    stored = job["settings"] | {"num_passes": 50, "learning_rate": 2.0}
    with ledger._engine.begin() as connection:
        connection.execute(update(schema.jobs).values(settings=stored))
    assert ledger.get_job(job["id"]).settings.num_passes == 50
    assert (await http.get(f"/v1/jobs/{job['id']}")).json() == job | {"settings": stored}


async def test_wrong_settings_are_refused_by_name(http):
    answer = await submit(http, "key", ["g"], num_passes=50, learning_rate=2, bata=1)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "body.settings.learning_rate: Input should be less than or equal to 1; "
        "body.settings.num_passes: Input should be less than or equal to 32; "
        "body.settings.bata: Extra inputs are not permitted"
    )
