"""With `--keep-calls`, no group may name a call that may be deleted before the group is stored."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from insitu.backend.api import upload
from insitu.backend.api.settings import ApiSettings
from insitu.backend.art import routes
from insitu.backend.http.app import build_api
from insitu.backend.ledger import Ledger
from insitu.records.store import RecordStore
from insitu.types import ModelCall

from .conftest import KEY, LIMITS, inline_group, put
from .test_api_groups import reference_group
from .test_art_routes import ASKED, request, trained

DAY = 86_400.0


@pytest.fixture
def app(tmp_path: Path, ledger: Ledger, records: RecordStore):
    limits = replace(LIMITS, max_call_age_seconds=DAY)
    return build_api(
        replace(ApiSettings.with_key(tmp_path, KEY), limits=limits), ledger=ledger, records=records
    )


async def test_an_old_call_is_rejected(
    http: httpx.AsyncClient, records: RecordStore, make_call: Callable[..., ModelCall]
) -> None:
    now = time.time()
    ages = {"old": DAY + 60, "young": DAY - 60}
    records.append([make_call(name, rollout_id="r", started_at=now - age) for name, age in ages.items()])
    refused = await put(http, "g", reference_group("young", "old"))
    assert refused.status_code == 422
    error = refused.json()["error"]
    assert error["message"] == "1 named calls are too old, the first is old"
    assert "keeps calls for 1 d only (insitu serve --keep-calls)" in error["hint"]
    assert (await put(http, "g", reference_group("young"))).status_code == 201


async def test_a_deleted_call_is_explained(http: httpx.AsyncClient) -> None:
    refused = await put(http, "g", reference_group("gone"))
    assert refused.status_code == 422
    assert "--keep-calls" in refused.json()["error"]["hint"]


async def test_an_inline_call_is_as_old_as_its_upload(
    http: httpx.AsyncClient, records: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await put(http, "g", inline_group())).status_code == 201
    calls = records.by_rollout("r0") + records.by_rollout("r1")
    assert [call.started_at for call in calls] == pytest.approx([time.time()] * 2, abs=60)
    # An upload under the same id finds the calls of the first one, which may be deleted at any time.
    later = time.time() + DAY + 60
    monkeypatch.setattr(upload.time, "time", lambda: later)
    assert (await put(http, "g", inline_group())).status_code == 422
    assert (await put(http, "g2", inline_group("s"))).status_code == 201


async def test_an_old_call_is_rejected_from_art_too(
    http: httpx.AsyncClient, ledger: Ledger, records: RecordStore, make_call: Callable[..., ModelCall]
) -> None:
    now = time.time()
    ages = {1: DAY + 60, 2: DAY - 60, 3: DAY - 60}
    said = {"messages": [ASKED], "answer": {"role": "assistant", "content": "8"}}
    records.append(
        [
            make_call(f"call-{n}", logprobs=[-0.5, -float(n)], started_at=now - age, **said)
            for n, age in ages.items()
        ]
    )
    old = await http.post("/_train_model", json=request(trained(1.0, -0.5, -1.0)))
    assert old.status_code == 422
    assert "its call call-1 is too old" in old.text
    assert "keeps calls for 1 d only (insitu serve --keep-calls)" in old.text
    mixed = request(*(trained(float(n), -0.5, -n) for n in ages)) | {"wait": False}
    receipt = (await http.post("/_train_model", json=mixed)).json()
    assert ["too old" in reason for reason in receipt["refused"]] == [True]
    (group,) = ledger.groups_of_job(receipt["job"])
    assert [trajectory.call_ids for trajectory in group.trajectories] == [["call-2"], ["call-3"]]


async def test_a_request_of_art_is_known_again_when_its_calls_have_grown_old(
    http: httpx.AsyncClient,
    records: RecordStore,
    make_call: Callable[..., ModelCall],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = {"role": "assistant", "content": "8"}
    records.append(
        [make_call("call", logprobs=[-0.5], messages=[ASKED], answer=answer, started_at=time.time())]
    )
    asked = request(trained(1.0, -0.5)) | {"wait": False}
    first = (await http.post("/_train_model", json=asked)).json()
    later = time.time() + DAY + 60
    monkeypatch.setattr(routes.time, "time", lambda: later)
    assert (await http.post("/_train_model", json=asked)).json() == first
