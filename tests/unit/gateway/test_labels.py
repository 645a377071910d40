"""Where a call says it comes from: rollout and function, by path or by header, and what is refused."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from yarl import URL

from insitu.records import packing
from insitu.records.store import RecordStore
from insitu.types import ModelCall
from tests.unit.gateway.conftest import API, GatewayUnderTest

CHAT = "v1/chat/completions"


async def test_a_function_in_the_path_is_recorded(gateway: GatewayUnderTest) -> None:
    for path in ("functions/planner", "functions/%3Cworkflow%3E", "functions/a.b_c-D"):
        status, _, _ = await gateway.post(str(URL(f"/rollouts/ro/{path}/{CHAT}", encoded=True)))
        assert status == 200
    await gateway.stream(f"/rollouts/ro/functions/streams/{CHAT}")
    await gateway.post("/rollouts/ro/functions/plain/v1/completions", prompt="x")
    records = await gateway.records()
    assert [r.function for r in records] == ["planner", "<workflow>", "a.b_c-D", "streams", "plain"]
    assert {r.rollout_id for r in records} == {"ro"}


async def test_a_function_in_the_header_is_recorded(gateway: GatewayUnderTest) -> None:
    await gateway.post(f"/rollouts/ro/{CHAT}", headers={"x-insitu-function": "planner"})
    await gateway.post(headers={"x-insitu-rollout": "r2", "x-insitu-function": "planner"})
    await gateway.post(f"/rollouts/ro/functions/planner/{CHAT}", headers={"x-insitu-function": "planner"})
    await gateway.post(f"/rollouts/ro/{CHAT}")
    labels = [(r.rollout_id, r.function) for r in await gateway.records()]
    assert labels == [("ro", "planner"), ("r2", "planner"), ("ro", "planner"), ("ro", None)]


async def test_models_are_listed_under_every_base_url(gateway: GatewayUnderTest) -> None:
    for prefix in ("", "/rollouts/ro", "/rollouts/ro/functions/planner"):
        async with gateway.session.get(f"{gateway.url}{prefix}/v1/models/run", headers=API) as got:
            assert (got.status, (await got.json())["id"]) == (200, "run")
        async with gateway.session.get(f"{gateway.url}{prefix}/v1/models", headers=API) as got:
            assert "run" in [card["id"] for card in (await got.json())["data"]]


@pytest.mark.parametrize("name", ["-x", ".x", "a b", "x" * 65, "a/b", "ä", "x\n", ">x"])
async def test_other_function_names_are_refused(gateway: GatewayUnderTest, name: str) -> None:
    url = URL(gateway.url) / "rollouts/ro/functions" / name.replace("/", "%2F") / "v1" / "chat/completions"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    async with gateway.session.post(url, json=body, headers=API) as got:
        error = (await got.json())["error"]
        assert (got.status, error["type"]) == (400, "InvalidRequest"), error
        assert "Function name" in error["message"]
    assert await gateway.records() == []


async def test_path_and_header_must_agree(gateway: GatewayUnderTest) -> None:
    path = f"/rollouts/ro/functions/planner/{CHAT}"
    for header in ("x-insitu-function", "x-insitu-rollout"):
        status, body, _ = await gateway.post(path, headers={header: "other"})
        assert status == 400
        assert "`other`" in body["error"]["message"]


def test_calls_recorded_before_there_were_functions_have_none(tmp_path, monkeypatch) -> None:
    dumps = packing.orjson.dumps

    def without_function(value: object) -> bytes:
        if isinstance(value, dict):
            value = {key: part for key, part in value.items() if key != "function"}
        return dumps(value)

    store = RecordStore(f"sqlite:///{tmp_path}/calls.db")
    call = ModelCall("c", "ro", "m", None, 0, "base", [1], [2], [-1.0], "stop", function="planner")
    with monkeypatch.context() as patch:
        patch.setattr(packing, "orjson", type("Old", (), {"dumps": without_function, "loads": None}))
        store.append([call])
    assert store.get(["c"])[0].function is None
    columns = {column["name"] for column in sa.inspect(store._engine).get_columns("calls")}
    assert "function" not in columns
    store.close()
