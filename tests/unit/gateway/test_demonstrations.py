"""Given answers become recorded calls, rendered by the engine; what it could not have said is rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from insitu.access.key_changes import create_key
from insitu.access.key_file import KEYS_FILE
from insitu.access.key_limits import KeyLimits
from insitu.access.scopes import Scope
from insitu.gateway.calls import demonstrations
from insitu.gateway_client import GatewayClient
from insitu.wire.bodies import Demonstration
from tests.support.standin_engine import (
    END,
    NEWLINE,
    PROMPT_IDS,
    Behaviour,
    StandinEngine,
    _json,
    spell,
    spell_messages,
)
from tests.unit.gateway.conftest import GatewayUnderTest, StartGateway
from tests.unit.gateway.test_scopes import bearer

PATH = "/rollouts/r1/v1/demonstrations"
TALK: list[Any] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2+3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6!"},
]


class Templated(StandinEngine):
    """A template that spoils an answer: `forget` changes the prompt, `endless` writes no end, `early` two."""

    def __init__(self, kind: str) -> None:
        super().__init__(Behaviour(texts=["x"]))
        self.kind = kind

    async def _render_chat(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        open_turn = body["add_generation_prompt"]
        ids = spell_messages(body["messages"], open_turn=open_turn)
        if not open_turn:
            early = [*ids[:-3], END, *ids[-3:]]
            ids = {"forget": [PROMPT_IDS[0] + 1, *ids[1:]], "endless": ids[:-2], "early": early}[self.kind]
        return _json(self._rendered(body, ids))


@pytest.fixture
async def gateway(start_gateway: StartGateway) -> GatewayUnderTest:
    return await start_gateway(make_engine=lambda: StandinEngine(Behaviour(texts=["x"])))


async def test_every_answer_is_a_call_up_to_its_end_of_turn(gateway: GatewayUnderTest) -> None:
    status, receipt, _ = await gateway.post(PATH, messages=TALK, headers={"x-insitu-function": "solver"})
    assert status == 200, receipt
    first, second = await gateway.records()
    assert first.prompt_ids == spell_messages(TALK[:2])
    assert first.output_ids == [*spell("5"), END]
    assert second.prompt_ids == spell_messages(TALK[:4])
    assert second.output_ids == [*spell("6!"), END]
    assert NEWLINE not in second.output_ids
    for call in (first, second):
        assert (call.source, call.finish_reason, call.run, call.policy_step) == (
            "demonstration",
            "stop",
            None,
            0,
        )
        assert (call.sampling, call.rollout_id, call.function) == ({}, "r1", "solver")
        assert call.logprobs == [0.0] * len(call.output_ids)
    assert (first.messages, first.answer) == (TALK[:2], TALK[2])
    assert receipt == {
        "calls": [
            {"id": first.id, "num_prompt_tokens": len(first.prompt_ids), "num_output_tokens": 2},
            {"id": second.id, "num_prompt_tokens": len(second.prompt_ids), "num_output_tokens": 3},
        ]
    }


async def test_calls_are_counted_and_listed_as_all_others(gateway: GatewayUnderTest) -> None:
    async with GatewayClient(gateway.url, "default") as client:
        receipt = await client.demonstrate("r2", Demonstration(model="run", messages=TALK, only_last=True))
        record = await client.rollout_record("r2")
    assert record.seen == 1
    assert [call["id"] for call in record.calls] == [call.id for call in receipt.calls]
    assert record.calls[0]["answer"] == TALK[-1]
    assert record.calls[0]["source"] == "demonstration"


async def test_the_engine_is_asked_once_which_tokens_end_an_answer(gateway: GatewayUnderTest) -> None:
    for _ in range(3):
        await gateway.post(PATH, messages=TALK)
    probes = gateway.engine.calls_to("/inference/v1/generate")
    assert [probe["sampling_params"]["allowed_token_ids"] for probe in probes] == [[NEWLINE], [END]]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "forget",
            "`messages[2]`: with this answer, the model's template renders the conversation before it",
        ),
        ("endless", "`messages[2]`: the model's template writes no token after this answer"),
        ("early", "`messages[2]` holds a token in its middle at which the engine stops"),
    ],
)
async def test_what_the_engine_could_not_have_said_is_rejected(
    start_gateway: StartGateway, kind: str, said: str
) -> None:
    gateway = await start_gateway(make_engine=lambda: Templated(kind))
    status, answer, _ = await gateway.post(PATH, messages=TALK)
    assert status == 400
    assert said in answer["error"]["message"]
    assert await gateway.records() == []
    async with GatewayClient(gateway.url, "default") as client:
        record = await client.rollout_record("r1")
    assert (record.seen, record.unrecorded) == (2, {"refused": 2})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": TALK[:2]}, "no assistant message"),
        ({"messages": TALK[2:3]}, "`messages[0]` is an answer to nothing"),
        ({"messages": TALK, "temperature": 0.5}, "no field `temperature`"),
        ({"messages": TALK, "only_last": 1}, "`only_last` must be true or false"),
        ({"messages": TALK, "model": "nobody"}, "`nobody` is not served here"),
    ],
)
async def test_requests_without_sense_are_rejected(
    gateway: GatewayUnderTest, body: dict[str, Any], said: str
) -> None:
    status, answer, _ = await gateway.post(PATH, **body)
    assert status in (400, 404)
    assert said in answer["error"]["message"]


async def test_a_key_is_needed(gateway: GatewayUnderTest) -> None:
    status, _, _ = await gateway.post(PATH, messages=TALK, headers={"authorization": "Bearer wrong"})
    assert status == 401


async def test_what_is_rendered_for_one_request_is_bounded(
    gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demonstrations, "_MOST_RENDERED_BYTES", 32 * 2**20)
    turn: list[Any] = [{"role": "user", "content": "x" * 100_000}, {"role": "assistant", "content": "5"}]
    status, body, _ = await gateway.post(PATH, messages=turn * 32)
    assert (status, body["error"]["type"]) == (413, "TooLarge")
    assert "32 answers and 528" in body["error"]["message"]
    assert "only_last" in body["error"]["hint"]
    assert not [path for path, _ in gateway.engine.seen if "render" in path]
    status, receipt, _ = await gateway.post(PATH, messages=turn * 32, only_last=True)
    assert (status, len(receipt["calls"])) == (200, 1)


async def test_demonstrated_tokens_count_against_the_key(start_gateway: StartGateway, tmp_path: Path) -> None:
    engine = StandinEngine(Behaviour(texts=["x"]))
    gateway = await start_gateway(make_engine=lambda: engine, keys_file=tmp_path / KEYS_FILE)
    key, _ = create_key(tmp_path, "agent", [Scope.INFER], limits=KeyLimits(tokens_per_day=1))
    assert (await gateway.post(PATH, messages=TALK, headers=bearer(key)))[0] == 200
    assert (await gateway.post(headers=bearer(key)))[0] == 429, "the tokens of the day are used up"
