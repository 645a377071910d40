from __future__ import annotations

import asyncio

import orjson
import pytest
from fastapi import FastAPI

from insitu.access.keyring import Holder
from insitu.access.projects import Project
from insitu.backend.api.events import admit, stream_events
from insitu.backend.ledger import Ledger
from insitu.errors import Overloaded
from insitu.types import JobState

from .conftest import inline_group, put, submit

OPERATOR = Holder("default", frozenset())


@pytest.fixture
async def job(http) -> str:
    await put(http, "g", inline_group())
    return (await submit(http, "k", ["g"])).json()["id"]


def parse(text: str) -> list[dict]:
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append(fields)
    return found


async def test_the_stream_tells_the_story_and_ends(app: FastAPI, http, ledger: Ledger, job: str):
    ledger.transition_job(job, JobState.RUNNING)
    ledger.set_progress(job, "train", 0.5, {"text": "two\nlines"})

    async def finish():
        while not app.state.services.streams.used:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        ledger.commit_step(job, 1, {"loss": 1.0}, "path", "sha")

    answer, _ = await asyncio.gather(http.get(f"/v1/jobs/{job}/events", timeout=10), finish())
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert ": still here" in answer.text
    events = parse(answer.text)
    assert [event["event"] for event in events] == ["queued", "running", "progress", "succeeded", "end"]
    assert orjson.loads(events[2]["data"])["data"] == {
        "text": "two\nlines",
        "phase": "train",
        "progress": 0.5,
    }
    assert orjson.loads(events[3]["data"])["data"] == {"step": 1, "metrics": {"loss": 1.0}}

    resumed = await http.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": events[1]["id"]})
    assert parse(resumed.text) == events[2:]
    nothing = await http.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": events[3]["id"]})
    assert [event["event"] for event in parse(nothing.text)] == ["end"]


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "9" * 30, "²"])
async def test_a_wrong_last_event_id_is_refused(http, job: str, value: str):
    headers = {"Last-Event-ID": value.encode()}
    assert (await http.get(f"/v1/jobs/{job}/events", headers=headers)).status_code == 400


async def test_unknown_jobs_have_no_stream(http):
    assert (await http.get(f"/v1/jobs/job-{'0' * 16}/events")).status_code == 404
    assert (await http.get("/v1/jobs/..%2f..%2fetc/events")).status_code in (400, 404)


async def test_one_keys_streams_leave_room_for_others(app: FastAPI, http, job: str):
    many, other = (Holder(name, frozenset(), Project(name)) for name in ("many", "other"))
    streams = [stream_events(app.state.services, job, 0, many) for _ in range(2)]
    for stream in streams:
        await anext(stream)
    with pytest.raises(Overloaded, match="2 event streams are open already"):
        admit(app.state.services, many)
    admit(app.state.services, other)
    for stream in streams:
        await stream.aclose()


async def test_streams_are_bounded_and_given_back(app: FastAPI, http, job: str):
    services = app.state.services
    streams = [stream_events(services, job, 0, OPERATOR) for _ in range(4)]
    for stream in streams:
        await anext(stream)
    assert (await http.get(f"/v1/jobs/{job}/events")).status_code == 429
    for stream in streams:
        await stream.aclose()
    assert services.streams.used == 0


async def test_a_request_that_waits_is_answered_at_the_end_of_the_job(
    app: FastAPI, http, ledger: Ledger, job: str
):
    ledger.transition_job(job, JobState.RUNNING)

    async def finish():
        while not app.state.services.num_waiting:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        ledger.commit_step(job, 1, {}, "path", "sha")

    began = asyncio.get_running_loop().time()
    answer, _ = await asyncio.gather(http.get(f"/v1/jobs/{job}?wait_seconds=10", timeout=20), finish())
    assert answer.json()["state"] == "succeeded"
    assert asyncio.get_running_loop().time() - began < 5
    assert app.state.services.num_waiting == 0


async def test_a_request_that_waits_is_answered_in_time_if_the_job_goes_on(app: FastAPI, http, job: str):
    answer = await http.get(f"/v1/jobs/{job}?wait_seconds=0.1", timeout=10)
    assert answer.json()["state"] == "queued"
    assert (await http.get(f"/v1/jobs/{job}?wait_seconds=11")).status_code == 400
    app.state.services.stopping = True
    assert (await http.get(f"/v1/jobs/{job}?wait_seconds=10", timeout=5)).json()["state"] == "queued"


async def test_those_that_wait_look_less_often_the_more_they_are(
    app: FastAPI, http, ledger: Ledger, job: str, monkeypatch: pytest.MonkeyPatch
):
    looks, get_job = 0, ledger.get_job

    def counted(job_id: str):
        nonlocal looks
        looks += 1
        return get_job(job_id)

    monkeypatch.setattr(ledger, "get_job", counted)
    await asyncio.gather(*(http.get(f"/v1/jobs/{job}?wait_seconds=1", timeout=20) for _ in range(20)))
    assert looks < 20 * 2 + 1 / 0.02  # at the begin, at the end and 50 a second between them


async def test_streams_end_without_an_end_mark_when_the_server_stops(app: FastAPI, job: str):
    services, sent = app.state.services, b""
    async with asyncio.timeout(30):
        async for chunk in stream_events(services, job, 0, OPERATOR):
            sent += chunk
            services.stopping = b"event: queued" in sent
    assert [event["event"] for event in parse(sent.decode())] == ["queued"]
