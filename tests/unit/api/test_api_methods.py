"""A step whose teacher or reference is not there is refused when it is submitted, by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from insitu.backend.api.settings import ApiSettings
from insitu.backend.http.app import build_api
from insitu.backend.ledger import Ledger
from insitu.records.store import RecordStore
from insitu.types import JobState, LoraSettings, RunState

from .conftest import KEY, LIMITS, inline_group, put, submit


@pytest.fixture
def app(tmp_path: Path, ledger: Ledger, records: RecordStore) -> FastAPI:
    settings = replace(ApiSettings.with_key(tmp_path, KEY), limits=LIMITS, teachers=("big",))
    return build_api(settings, ledger=ledger, records=records)


async def refused(http: httpx.AsyncClient, status: int, **settings: object) -> str:
    answer = await submit(http, "refused", ["g"], **settings)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


async def one_step(http: httpx.AsyncClient, ledger: Ledger) -> None:
    await put(http, "first", inline_group("first"))
    job = (await submit(http, "first", ["first"])).json()["id"]
    ledger.transition_job(job, JobState.RUNNING)
    ledger.commit_step(job, 1, {"loss": 1.0}, "path", "sha")


async def test_unknown_teachers_are_refused_and_known_ones_taken(
    http: httpx.AsyncClient, ledger: Ledger
) -> None:
    await one_step(http, ledger)
    await put(http, "g", inline_group())
    ledger.register_run("project", "closed", "model", LoraSettings(), {}, {})
    ledger.transition_run("closed", RunState.CLOSED)
    distill = {"method": "distill"}
    assert "no teacher 'huge' here; `insitu serve --teacher` named big" in await refused(
        http, 422, **distill, teacher="huge"
    )
    assert "no teacher 'http://h/v1' here" in await refused(http, 422, **distill, teacher="http://h/v1")
    assert "nowhere" in await refused(http, 404, **distill, teacher="nowhere@1")
    assert "closed@3 is not kept" in await refused(http, 404, **distill, teacher="closed@3")
    assert "kept steps of run 'run': 1" in await refused(http, 404, **distill, teacher="run@2")
    assert "needs a teacher" in await refused(http, 400, **distill)
    assert "does not use min_reward" in await refused(http, 400, min_reward=0.5)
    for number, teacher in enumerate(("big", "run@1", "closed@0")):
        await put(http, f"g{number}", inline_group(f"r{number}-"))
        taken = await submit(http, f"key-{number}", [f"g{number}"], **distill, teacher=teacher)
        assert taken.status_code == 202, taken.text


@pytest.mark.parametrize("settings", [{"method": "dpo"}, {"beta": 0.1}])
async def test_a_reference_that_is_not_kept_is_refused(
    http: httpx.AsyncClient, ledger: Ledger, settings: dict[str, object]
) -> None:
    await one_step(http, ledger)
    await put(http, "g", inline_group())
    assert "run@7 is not kept" in await refused(http, 404, **settings, reference_step=7)
    taken = await submit(http, "key", ["g"], **settings, reference_step=1)
    assert taken.status_code == 202
