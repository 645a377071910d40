"""Calls through the gateway: what the engine is asked, what the client sees, what is recorded."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from tests.support.standin_engine import UNRECORDABLE, Behaviour, StandinEngine
from tests.unit.gateway.conftest import API, MESSAGES, GatewayUnderTest, StartGateway, until

GENERATE = "/inference/v1/generate"


async def test_a_chat_call_is_answered_and_recorded(gateway: GatewayUnderTest) -> None:
    status, body, call_id = await gateway.post(
        "/rollouts/ro-1/v1/chat/completions", model="run", max_tokens=9
    )
    assert status == 200
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": " w0 w1 w2 w3"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    (record,) = await gateway.records()
    assert (record.id, record.rollout_id, record.model) == (call_id, "ro-1", "run")
    assert (record.run, record.policy_step, record.policy_version) == ("run", 0, "base")
    assert record.prompt_ids == gateway.engine.calls_to(GENERATE)[0]["token_ids"]
    assert (record.output_ids, record.logprobs) == ([1000, 1001, 1002, 1003], [-0.5, -1.5, -2.5, -3.5])
    assert (record.messages, record.answer) == (MESSAGES, body["choices"][0]["message"])
    assert record.sampling["max_tokens"] == 9
    assert set(record.timings) == {"held", "render", "generate", "derender", "total"}
    assert not record.constrained


async def test_the_engine_gets_every_sampling_parameter(gateway: GatewayUnderTest) -> None:
    await gateway.post(seed=3)
    sampling = gateway.engine.calls_to(GENERATE)[0]["sampling_params"]
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0}
    neutral |= {"frequency_penalty": 0.0, "repetition_penalty": 1.0, "logprobs": 0, "n": 1, "seed": 3}
    assert {key: sampling[key] for key in neutral} == neutral


async def test_logprobs_and_ids_are_shown_only_when_asked_for(gateway: GatewayUnderTest) -> None:
    _, body, _ = await gateway.post()
    assert "token_ids" not in body["choices"][0]
    assert "prompt_token_ids" not in body
    _, body, _ = await gateway.post(logprobs=True, return_token_ids=True)
    assert [e["top_logprobs"] for e in body["choices"][0]["logprobs"]["content"]] == [[]] * 4
    assert body["choices"][0]["token_ids"] == [1000, 1001, 1002, 1003]
    assert len(body["prompt_token_ids"]) == 5
    _, body, _ = await gateway.post(logprobs=True, top_logprobs=3)
    assert len(body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 1
    assert gateway.engine.calls_to(GENERATE)[-1]["sampling_params"]["logprobs"] == 3


async def test_completions_take_text_or_ids(gateway: GatewayUnderTest) -> None:
    for prompt in ("some text", [5, 6, 7]):
        status, body, _ = await gateway.post("/v1/completions", prompt=prompt)
        assert (status, body["choices"][0]["text"]) == (200, " w0 w1 w2 w3")
    records = await gateway.records()
    assert records[1].prompt_ids == [5, 6, 7]
    assert (records[1].messages, records[1].answer) == (None, {"text": " w0 w1 w2 w3"})


async def test_a_masked_distribution_is_recorded_as_such(gateway: GatewayUnderTest) -> None:
    await gateway.post(response_format={"type": "json_object"})
    await gateway.post(logit_bias={"5": 1.0})
    assert [r.constrained for r in await gateway.records()] == [True, True]


async def test_stop_strings_do_not_reach_the_client(gateway: GatewayUnderTest) -> None:
    gateway.engine.behaviour.stop_reason = "w2"
    _, body, _ = await gateway.post(stop="w2")
    assert body["choices"][0]["message"]["content"] == " w0 w1 "
    events, _, _ = await gateway.stream(stop=["w2"])
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == " w0 w1 "
    assert [len(r.output_ids) for r in await gateway.records()] == [4, 4]


async def test_an_engine_with_parsers_gets_the_request_and_tools_come_back(gateway: GatewayUnderTest) -> None:
    gateway.engine.behaviour.parser = True
    tools = [{"type": "function", "function": {"name": "look"}}]
    _, body, _ = await gateway.post(tools=tools)
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"
    derender = gateway.engine.calls_to("/v1/chat/completions/derender")[-1]
    assert derender["chat_request"]["tools"] == tools
    assert derender["prompt_token_ids"] == derender["generate_response"]["prompt_token_ids"]
    (record,) = await gateway.records()
    assert (record.tools, record.finish_reason) == (tools, "stop")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_streams_look_like_openais(gateway: GatewayUnderTest, path: str) -> None:
    gateway.engine.behaviour.chunk_seconds = 0.02
    extra: dict[str, Any] = {} if "chat" in path else {"prompt": "x"}
    events, call_id, done = await gateway.stream(path, stream_options={"include_usage": True}, **extra)
    assert done
    *chunks, usage = events
    assert len(chunks) >= 3
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    if "chat" in path:
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    else:
        text = "".join(c["choices"][0]["text"] for c in chunks)
    assert text == " w0 w1 w2 w3"
    (record,) = await gateway.records()
    assert (record.id, record.output_ids) == (call_id, [1000, 1001, 1002, 1003])
    assert text in (record.answer or {}).values()


async def test_a_slow_client_costs_fewer_hops(gateway: GatewayUnderTest) -> None:
    gateway.engine.behaviour.num_tokens = 200
    events, _, done = await gateway.stream(return_token_ids=True)
    assert done
    assert [t for e in events for t in e["choices"][0]["token_ids"]] == [1000 + i for i in range(200)]
    assert len(events) < 100  # the stand-in sends all tokens at once: they were merged


@pytest.mark.parametrize("fault", UNRECORDABLE)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_doubtful_answer_is_an_error_and_never_a_complete_record(
    gateway: GatewayUnderTest, fault: str, stream: bool
) -> None:
    gateway.engine.behaviour.fault = fault
    status, error, done = await _call_or_error(gateway, stream)
    assert status in (200, 502)
    assert error["type"] == "UpstreamError"
    assert not done
    assert not any(record.complete for record in await gateway.records())


@pytest.mark.parametrize("fault", ["mixed-weights", "no-weights", "aborted"])
async def test_doubtful_weights_are_tried_again_then_refused(gateway: GatewayUnderTest, fault: str) -> None:
    gateway.engine.behaviour.fault, gateway.engine.behaviour.fault_count = fault, 1
    assert (await gateway.post())[0] == 200
    gateway.engine.behaviour.fault_count = -1
    status, body, _ = await gateway.post()
    assert (status, body["error"]["type"]) == (502, "UpstreamError")
    assert len(await gateway.records()) == 1


async def test_another_version_than_promised_waits_for_the_table(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(settle_seconds=0.2)
    gateway.engine.behaviour.weight_version = "run@1"
    status, body, _ = await gateway.post()
    assert status == 502
    assert "should be `base`, but the engine reports `run@1`" in body["error"]["message"]
    call = asyncio.create_task(gateway.post(model="run"))
    await until(lambda: len(gateway.engine.calls_to(GENERATE)) == 3, "the call met the wrong weights")
    await gateway.put_table(
        runs={"run": {"latest": 1, "served": {"1": {"engine_model": "tiny", "version": "run@1"}}}}
    )
    assert (await call)[0] == 200
    (record,) = await gateway.records()
    assert (record.policy_version, record.policy_step) == ("run@1", 1)


async def test_the_engines_refusal_reaches_the_client(gateway: GatewayUnderTest) -> None:
    gateway.engine.behaviour.fault = "render-400"
    status, body, _ = await gateway.post()
    assert status == 400
    assert "the template does not like this" in body["error"]["message"]
    assert (await gateway.state())["replicas"]["replica-0"]["healthy"]


async def _call_or_error(gateway: GatewayUnderTest, stream: bool) -> tuple[int, dict[str, Any], bool]:
    body = orjson.dumps({"model": "tiny", "messages": MESSAGES, "stream": stream})
    async with gateway.session.post(f"{gateway.url}/v1/chat/completions", data=body, headers=API) as got:
        data = await got.read()
        last = data.removesuffix(b"\n\n").rsplit(b"data: ", 1)[-1]
        return got.status, orjson.loads(last)["error"], b"[DONE]" in data


async def test_what_concerns_the_transport_alone_is_sent_and_not_recorded(gateway: GatewayUnderTest) -> None:
    await gateway.post()
    await gateway.stream()
    await gateway.post(stop="END")
    sent = [body["sampling_params"] for body in gateway.engine.calls_to(GENERATE)]
    assert [one["detokenize"] for one in sent] == [False, False, True], (
        "only stop strings need the engine's text"
    )
    assert [one.get("stream_interval") for one in sent] == [None, 8, None]
    for call in await gateway.records():
        assert not {"detokenize", "stream_interval"} & call.sampling.keys()


async def test_a_stream_in_steps_has_every_token(start_gateway: StartGateway) -> None:
    behaviour = Behaviour(num_tokens=19, keeps_interval=True, chunk_seconds=0.01)
    gateway = await start_gateway(make_engine=lambda: StandinEngine(behaviour))
    events, _, done = await gateway.stream(return_token_ids=True)
    parts = [event["choices"][0]["token_ids"] for event in events]
    assert done
    assert [token for part in parts for token in part] == [1000 + i for i in range(19)]
    assert len(parts[0]) == 1
    assert 3 <= len(parts) <= 4, "1, 8, 8 and 2 tokens; later ones may be merged"
    [call] = await gateway.records()
    assert call.output_ids == [1000 + i for i in range(19)]
