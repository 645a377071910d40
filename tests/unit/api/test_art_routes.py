"""ART's routes: the same ledger, the same key, and no step twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from insitu.backend.api.settings import ApiSettings
from insitu.backend.http.app import build_api
from insitu.backend.ledger import Ledger
from insitu.records.store import RecordStore
from insitu.types import JobState, ModelCall, RunState
from tests.unit.api.conftest import KEY, LIMITS

MODEL = {"name": "run", "project": "project", "base_model": "model", "trainable": True, "config": None}
ASKED = {"role": "user", "content": "3 + 5?"}


def trained(reward: float, *logprobs: float) -> dict[str, Any]:
    content = [{"token": "t", "logprob": value} for value in logprobs]
    choice = {"index": 0, "logprobs": {"content": content}, "message": {"role": "assistant", "content": "8"}}
    return {"messages_and_choices": [ASKED, choice], "reward": reward}


def request(*trajectories: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": MODEL,
        "trajectory_groups": [{"trajectories": list(trajectories)}],
        "config": {"learning_rate": 1e-4, "kl_penalty_coef": 0.0},
        "dev_config": {},
        "verbose": False,
    }


@pytest.fixture
def recorded(records: RecordStore, make_call: Callable[..., ModelCall]) -> None:
    answer = {"role": "assistant", "content": "8"}
    records.append(
        [
            make_call(f"call-{n}", logprobs=[-0.5, -float(n)], messages=[ASKED], answer=answer)
            for n in range(1, 4)
        ]
    )


async def finish(ledger: Ledger, step: int) -> None:
    while not (jobs := ledger.next_jobs()):
        await asyncio.sleep(0.01)
    (job,) = jobs
    ledger.transition_job(job.id, JobState.RUNNING)
    await asyncio.sleep(0.1)
    ledger.commit_step(job.id, step, {"loss": 0.5, "reward/mean": 0.5, "note": "text"}, "path", "sha")


@pytest.mark.timeout(20)
@pytest.mark.usefixtures("recorded")
async def test_a_step_streams_its_metrics_and_a_repeated_request_finds_it(
    http: httpx.AsyncClient, ledger: Ledger
):
    body = request(trained(1.0, -0.5, -1.0), trained(0.0, -0.5, -2.0), trained(0.0, -0.7))
    answer, _ = await asyncio.gather(http.post("/_train_model", json=body), finish(ledger, 1))
    assert answer.status_code == 200, answer.text
    lines = answer.text.splitlines()
    assert lines[0] == "", "empty lines show that it is still at work"
    assert orjson.loads(lines[-1]) == {"loss": 0.5, "reward/mean": 0.5, "account/refused": 1.0}
    again = await http.post("/_train_model", json=body)
    assert orjson.loads(again.text) == orjson.loads(lines[-1])
    assert ledger.next_jobs() == []
    assert (await http.post("/_get_step", json=MODEL)).json() == 1


@pytest.mark.timeout(20)
@pytest.mark.usefixtures("recorded")
async def test_a_failed_step_breaks_the_stream_off_and_may_be_asked_for_again(
    http: httpx.AsyncClient, ledger: Ledger
):
    body = request(trained(1.0, -0.5, -1.0), trained(0.0, -0.5, -2.0))

    async def fail() -> None:
        while not (jobs := ledger.next_jobs()):
            await asyncio.sleep(0.01)
        (job,) = jobs
        ledger.transition_job(job.id, JobState.RUNNING)
        ledger.fail_job(job.id, "out of memory")

    answer, _ = await asyncio.gather(http.post("/_train_model", json=body), fail())
    assert not any(line.strip() for line in answer.text.splitlines()), "no figures of a step that is none"
    answer, _ = await asyncio.gather(http.post("/_train_model", json=body), finish(ledger, 1))
    assert orjson.loads(answer.text.splitlines()[-1])["loss"] == 0.5


@pytest.mark.timeout(20)
@pytest.mark.usefixtures("recorded")
async def test_a_client_that_does_not_wait_gets_the_job_and_a_repeated_request_the_same_one(
    http: httpx.AsyncClient, ledger: Ledger
):
    body = request(trained(1.0, -0.5, -1.0), trained(0.0, -0.5, -2.0), trained(0.0, -0.7))
    body |= {"wait": False, "insitu": {"max_staleness": 0, "learning_rate": 1e-3}}
    answer = (await http.post("/_train_model", json=body)).json()
    assert len(answer["refused"]) == 1
    settings = ledger.get_job(answer["job"]).settings
    assert (settings.max_staleness, settings.learning_rate) == (0, 1e-3)
    await finish(ledger, 1)
    # Its calls are one step old now: too old for another step, not for finding this one.
    assert (await http.post("/_train_model", json=body)).json() == answer
    wrong = await http.post("/_train_model", json=body | {"insitu": {"lerning_rate": 1}})
    assert wrong.status_code == 400
    assert "lerning_rate" in wrong.text


@pytest.mark.timeout(20)
@pytest.mark.usefixtures("recorded")
async def test_words_that_were_said_and_trained_on_before_are_not_taken_for_those_said_now(
    http: httpx.AsyncClient, ledger: Ledger, records: RecordStore
):
    once = request(trained(1.0, -0.5, -1.0), trained(0.0, -0.5, -2.0)) | {"wait": False}
    await http.post("/_train_model", json=once)
    await finish(ledger, 1)
    again = request(trained(0.5, -0.5, -1.0), trained(0.0, -0.5, -3.0)) | {"wait": False}

    async def record() -> None:
        await asyncio.sleep(0.05)
        (old,) = records.get(["call-1"])
        records.append([replace(old, id="call-9")])

    answer, _ = await asyncio.gather(http.post("/_train_model", json=again), record())
    (group,) = ledger.groups_of_job(answer.json()["job"])
    assert [trajectory.call_ids for trajectory in group.trajectories] == [["call-9"], ["call-3"]]
    third = request(trained(0.25, -0.5, -1.0)) | {"wait": False}
    assert "was trained on already" in (await http.post("/_train_model", json=third)).text


@pytest.mark.usefixtures("recorded")
async def test_nothing_recorded_is_a_refusal_with_the_reason(http: httpx.AsyncClient, ledger: Ledger):
    answer = await http.post("/_train_model", json=request(trained(1.0, -9.0)))
    assert answer.status_code == 422
    assert "no recorded call of run run has its 1 logprobs" in answer.text
    assert ledger.next_jobs() == []


async def test_registering_and_preparing_tells_where_to_call_the_model(
    http: httpx.AsyncClient, ledger: Ledger, tmp_path: Path
):
    model = MODEL | {"name": "other"}
    assert (await http.post("/register", json=model)).status_code == 200
    assert (
        await http.post("/register", json=MODEL | {"base_model": None, "name": "judge"})
    ).status_code == 200
    assert [run.name for run in ledger.list_runs()] == ["run", "other"]
    for state in (RunState.LOADING, RunState.READY):
        ledger.transition_run("other", state)
    answer = await http.post("/_prepare_backend_for_training", json={"model": model, "config": None})
    assert answer.status_code == 503, "nobody has said yet where the gateway is"
    (tmp_path / "status.json").write_text('{"gateway_port": 8000}')
    answer = await http.post("/_prepare_backend_for_training", json={"model": model, "config": None})
    assert answer.json() == ["http://127.0.0.1:8000/v1", KEY]
    strange = {"model": model, "config": {"server_args": {"port": 1}}}
    assert "server_args" in (await http.post("/_prepare_backend_for_training", json=strange)).text


async def test_a_run_that_cannot_be_served_says_why(http: httpx.AsyncClient, ledger: Ledger):
    ledger.transition_run("run", RunState.FAILED, "base model is not the one that was started")
    answer = await http.post("/_prepare_backend_for_training", json={"model": MODEL, "config": None})
    assert answer.status_code == 422
    assert "base model is not the one that was started" in answer.text


async def test_the_key_may_stand_in_the_address(stranger: httpx.AsyncClient):
    assert (await stranger.get("/healthcheck")).status_code == 401
    assert (await stranger.get("/healthcheck", auth=("art", KEY))).json() == {"status": "ok"}
    assert (await stranger.get("/healthcheck", auth=("art", "wrong"))).status_code == 401
    assert (await stranger.post("/close", auth=("art", KEY))).status_code == 200


async def test_an_unknown_model_is_not_found(http: httpx.AsyncClient):
    assert (await http.post("/_get_step", json=MODEL | {"name": "nobody"})).status_code == 404


async def test_a_name_or_rank_that_cannot_be_is_refused_by_name(http: httpx.AsyncClient):
    answer = await http.post("/register", json=MODEL | {"name": "My Model"})
    assert answer.status_code == 400
    assert "name: String should match pattern" in answer.text
    wrong = MODEL | {"name": "x", "_internal_config": {"peft_args": {"r": 0}}}
    answer = await http.post("/register", json=wrong)
    assert answer.status_code == 400
    assert "rank: Input should be greater than" in answer.text


@pytest.mark.timeout(20)
async def test_what_art_sends_is_bounded_in_bytes_and_values(
    tmp_path: Path, ledger: Ledger, records: RecordStore
) -> None:
    limits = replace(LIMITS, max_training_values=100)
    settings = replace(ApiSettings.with_key(tmp_path, KEY), limits=limits)
    app = build_api(settings, ledger=ledger, records=records)
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as http:
        for route, body, told in (
            ("/register", b"{" + b" " * limits.max_body_bytes + b"}", f"over {limits.max_body_bytes} bytes"),
            ("/_train_model", b"[" + b"[]," * 100 + b"[]]", "up to 203 values; the limit is 100"),
        ):
            got = await http.post(route, content=body)
            assert (got.status_code, got.json()["error"]["type"]) == (413, "TooLarge")
            assert told in got.json()["error"]["message"]
