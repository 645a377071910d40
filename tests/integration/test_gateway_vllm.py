"""The gateway in front of a real vLLM: records are exact, answers are vLLM's own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from insitu.backend.fleet.replica import EngineClient
from insitu.errors import CannotHonour
from insitu.testing.models import tiny
from tests.support.gateway_process import (
    API,
    EXACT,
    Running,
    direct,
    start_gateway,
    wait_up,
    worst_difference,
)
from tests.support.replaying_engine import ReplayingEngine
from tests.support.vllm_server import VllmServer, vllm_server

pytestmark = pytest.mark.timeout(600)


async def one_rollout(gateway: Running, number: int) -> None:
    """Three turns of chat (every second rollout streams) and one plain completion."""
    client, stream = gateway.client(f"ro-{number}"), number % 2 == 1
    messages: list[Any] = [{"role": "user", "content": f"Tell me about the number {number}."}]
    for turn in range(3):
        options: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 8 + number % 5}
        if stream:
            chunks = [c async for c in await client.chat.completions.create(**options, stream=True)]
            text = "".join(c.choices[0].delta.content or "" for c in chunks)
            assert chunks[-1].choices[0].finish_reason in ("stop", "length")
        else:
            answer = await client.chat.completions.create(**options)
            text = answer.choices[0].message.content or ""
            assert answer.usage is not None
            assert answer.usage.completion_tokens <= options["max_tokens"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And turn {turn}?"}]
    await client.completions.create(model="tiny", prompt=f"number {number} is", max_tokens=6)
    await client.close()


async def test_records_are_what_the_model_computes(gateway: Running) -> None:
    await asyncio.gather(*(one_rollout(gateway, number) for number in range(52)))
    calls = await gateway.records()
    assert len(calls) == 208
    model = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)
    worst = worst_difference(calls, model)
    print(f"\nworst |recorded - recomputed| over {len(calls)} calls: {worst:.2e}")
    assert worst <= EXACT
    tokenizer = AutoTokenizer.from_pretrained(tiny())
    special, num_compared = set(tokenizer.added_tokens_decoder), 0
    for call in calls:
        answer = call.answer or {}
        text = answer.get("content", answer.get("text"))
        decoded = tokenizer.decode(call.output_ids, skip_special_tokens=True)
        # A random model also samples special tokens (derender shows those that are not the tokenizer's
        # own end tokens, a plain decode hides them all) and halves of characters (derender waits).
        shown = call.output_ids[:-1] if call.finish_reason == "stop" else call.output_ids
        if not special & set(shown) and "\N{REPLACEMENT CHARACTER}" not in decoded:
            assert text == decoded
            num_compared += 1
        if call.messages is not None:
            template = tokenizer.apply_chat_template(
                call.messages, add_generation_prompt=True, return_dict=False
            )
            if len(call.messages) == 1:
                assert call.prompt_ids == template
            # Later turns have the ids that were sampled, and the template's text.
            assert tokenizer.decode(call.prompt_ids) == tokenizer.decode(template)
        assert call.policy_version == "default"
    assert num_compared > 100


async def test_a_seeded_answer_is_the_engines_own(gateway: Running) -> None:
    for seed in range(4):
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "seed": seed,
            "max_tokens": 12,
        }
        ours = await gateway.request("POST", "/v1/chat/completions", body)
        theirs = await direct(gateway, "/v1/chat/completions", body)
        content = theirs["choices"][0]["message"]["content"]
        assert ours["choices"][0]["message"]["content"] == content
        words = content.split(" ")
        stops = {"stop": [words[len(words) // 2]]}
        theirs = await direct(gateway, "/v1/chat/completions", body | stops)
        expected = theirs["choices"][0]["message"]["content"]
        ours = await gateway.request("POST", "/v1/chat/completions", body | stops)
        assert ours["choices"][0]["message"]["content"] == expected
        chunks = await gateway.client().chat.completions.create(**body | stops, stream=True)  # type: ignore[call-overload]
        assert "".join([c.choices[0].delta.content or "" async for c in chunks]) == expected


async def test_a_limit_that_is_the_engines_default_is_a_limit(gateway: Running) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 16,
        "ignore_eos": True,
    }
    answer = await gateway.request("POST", "/v1/chat/completions", body)
    assert answer["usage"]["completion_tokens"] == 16


async def test_logprobs_look_like_the_engines(gateway: Running) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 5}
    body |= {"logprobs": True, "top_logprobs": 3}
    ours = (await gateway.request("POST", "/v1/chat/completions", body))["choices"][0]["logprobs"]["content"]
    theirs = (await direct(gateway, "/v1/chat/completions", body))["choices"][0]["logprobs"]["content"]
    assert [e["token"] for e in ours] == [e["token"] for e in theirs]
    assert [len(e["top_logprobs"]) for e in ours] == [len(e["top_logprobs"]) for e in theirs]


async def test_the_engines_own_metrics_are_readable(gateway: Running) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{gateway.url}/health") as got:
            (engine,) = (await got.json())["replicas"]
        async with session.get(f"{gateway.url}/engines/{engine}/metrics", headers=API) as got:
            assert got.status == 200
            text = await got.text()
    for name in ("vllm:kv_cache_usage_perc", "vllm:num_requests_waiting", "vllm:num_preemptions_total"):
        assert f"\n{name}{{" in text, name
    assert "lora_requests_info" not in text


async def test_a_client_that_leaves_frees_the_engine(gateway: Running) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 900,
        "stream": True,
    }
    body |= {"ignore_eos": True}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{gateway.url}/v1/chat/completions", json=body, headers=API) as got:
            await got.content.readany()
        deadline = time.monotonic() + 5
        while True:
            async with session.get(f"{gateway.engine.url}/metrics") as got:
                lines = [
                    x for x in (await got.text()).splitlines() if x.startswith("vllm:num_requests_running")
                ]
            if lines and all(float(line.rsplit(" ", 1)[1]) == 0 for line in lines):
                break
            assert time.monotonic() < deadline, lines
            await asyncio.sleep(0.05)
    (record,) = await gateway.records()
    assert (record.finish_reason, record.complete) == ("cancelled", False)


async def test_the_weights_that_answered_are_the_weights_on_record(gateway: Running) -> None:
    body = {"model": "run", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}

    def merged(step: int) -> dict[str, Any]:
        served = {str(step): {"engine_model": "tiny", "version": f"run@{step}"}}
        return {"run": {"latest": step, "served": served}}

    await gateway.put_table(runs=merged(1))
    refused = await gateway.request("POST", "/v1/chat/completions", body)
    assert (refused["status"], refused["error"]["type"]) == (502, "UpstreamError")
    async with aiohttp.ClientSession() as session:
        for version in ("run@1", "default"):
            url = f"{gateway.engine.url}/update_weight_version"
            async with session.post(url, json={"new_version": version}) as got:
                assert got.status == 200, await got.text()
            if version == "run@1":
                answer = await gateway.request("POST", "/v1/chat/completions", body)
                assert answer["status"] == 200, answer
                (record,) = await gateway.records([answer["call_id"]])
                assert (record.policy_version, record.policy_step) == ("run@1", 1)


async def test_adapters_are_named_by_the_engine(gateway: Running, tmp_path: Path) -> None:
    model = make_adapter(tmp_path / "adapter")
    async with aiohttp.ClientSession() as session:
        load = {"lora_name": "run@1", "lora_path": str(tmp_path / "adapter")}
        async with session.post(f"{gateway.engine.url}/v1/load_lora_adapter", json=load) as got:
            assert got.status == 200, await got.text()
        served = {
            "1": {"engine_model": "run@1", "version": "run@1"},
            "0": {"engine_model": "tiny", "version": "default"},
        }
        await gateway.put_table(runs={"run": {"latest": 1, "served": served}})
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        ids: dict[str, list[str]] = {"run": [], "run@0": []}
        for name, calls in ids.items():
            answer = await gateway.request("POST", "/v1/chat/completions", body | {"model": name})
            assert answer["status"] == 200, answer
            stream = await gateway.client().chat.completions.with_raw_response.create(
                **body | {"model": name}, stream=True
            )  # type: ignore[call-overload]
            assert [c async for c in stream.parse()]
            calls += [answer["call_id"], stream.headers["x-insitu-call-id"]]
        adapted, plain = await gateway.records(ids["run"]), await gateway.records(ids["run@0"])
        assert {c.policy_version for c in adapted} == {"run@1"}
        assert {c.policy_version for c in plain} == {"default"}
        assert worst_difference(adapted, model) <= EXACT
        with model.disable_adapter():
            assert worst_difference(plain, model) <= EXACT
            assert worst_difference(adapted, model) > EXACT
        unload = f"{gateway.engine.url}/v1/unload_lora_adapter"
        async with session.post(unload, json={"lora_name": "run@1"}) as got:
            assert got.status == 200
    gone = await gateway.request("POST", "/v1/chat/completions", body | {"model": "run"})
    assert (gone["status"], gone["error"]["type"]) == (502, "UpstreamError")


@pytest.mark.parametrize("harm", ["none", "a name that is not mapped", "a half of a layer"])
async def test_an_engine_serves_an_adapter_whole_or_not_at_all(
    gateway: Running, tmp_path: Path, harm: str
) -> None:
    make_adapter(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(each for each in tensors if each.endswith("layers.0.self_attn.q_proj.lora_B.weight"))
    if harm == "a name that is not mapped":
        for half in "AB":
            old = name.replace("lora_B", f"lora_{half}")
            tensors[old.replace("self_attn", "linear_attn")] = tensors.pop(old)
    elif harm == "a half of a layer":
        del tensors[name]
    save_file(tensors, path)
    async with aiohttp.ClientSession() as http:
        engine = EngineClient(http, gateway.engine.url)
        if harm == "none":
            await engine.load_adapter("whole@1", tmp_path)
            assert "whole@1" in await engine.adapters()
            await engine.unload_adapter("whole@1")
            return
        with pytest.raises(CannotHonour, match=r"layers\.0\.(linear_attn|self_attn)\.q_proj\.lora_A"):
            await engine.load_adapter("harmed@1", tmp_path)
        assert "harmed@1" not in await engine.adapters()


def make_adapter(folder: Path) -> Any:
    """A random adapter that visibly changes the tiny model."""
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)
    model = get_peft_model(
        base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module")
def vllm_tools() -> Iterator[VllmServer]:
    with vllm_server(tiny(), "tiny", "--enable-auto-tool-choice", "--tool-call-parser", "hermes") as server:
        yield server


async def test_forced_tool_calls_come_back_parsed(vllm_tools: VllmServer, tmp_path: Path) -> None:
    for gateway in start_gateway(vllm_tools, tmp_path):
        await wait_up(gateway)
        await gateway.put_table()
        schema = {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]}
        function = {"name": "look", "strict": True, "parameters": schema | {"additionalProperties": False}}
        choice = {"type": "function", "function": {"name": "look"}}
        body = {"model": "tiny", "messages": [{"role": "user", "content": "look"}], "max_tokens": 200}
        body |= {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
        called = {}
        for seed in range(10):  # a random model does not always close its JSON in time
            answer = await gateway.request("POST", "/v1/chat/completions", body | {"seed": seed})
            assert answer["status"] == 200, answer
            if calls := answer["choices"][0]["message"].get("tool_calls"):
                called[seed] = calls[0]["function"]
        assert called
        seed, function = next(iter(called.items()))
        assert function["name"] == "look"
        options: Any = body | {"seed": seed, "stream": True}
        chunks = await gateway.client().chat.completions.create(**options)
        deltas = [d for c in [c async for c in chunks] for d in c.choices[0].delta.tool_calls or []]
        assert deltas[0].function.name == "look"
        records = await gateway.records()
        assert all(r.constrained for r in records)
        streamed = (records[-1].answer or {})["tool_calls"][0]["function"]
        assert streamed["arguments"] == "".join(d.function.arguments or "" for d in deltas)
        assert json.loads(streamed["arguments"]) == json.loads(function["arguments"])


TWICE = '<tool_call>{"name": "look", "arguments": {}}</tool_call>' * 2
SAID = [
    "It is 7.",
    "é < 3, and <tool is no call",
    'Let me look. <tool_call>\n{"name": "look", "arguments": {"far": true, "at": "é"}}\n</tool_call>',
    TWICE,
    '<tool_call>{"name": "look", "arguments": {"far": tr',
    "<think>x</think>y",
]
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALLS: dict[str, Any] = {"tools": [LOOK]}
OPTIONS: list[dict[str, Any]] = [CALLS, {}, CALLS | {"tool_choice": "none"}]


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_are_read_here_as_the_engine_reads_them(
    vllm_tools: VllmServer, tmp_path: Path, stream: bool
) -> None:
    async with ReplayingEngine(vllm_tools.url) as engine:
        for gateway in start_gateway(replace(vllm_tools, url=engine.url), tmp_path):
            await wait_up(gateway)
            await gateway.put_table()
            reader = Reader(gateway, engine, stream)
            for text in SAID + SAID[:2]:
                _, num_asked = await reader.read(text, **CALLS)
                assert num_asked > 0, "the first eight are compared"
            for text, options in [(text, options) for text in SAID for options in OPTIONS]:
                # Such an argument could turn on a parser for reasoning that the probe did not see.
                theirs, num_asked = await reader.read(
                    text, **options, chat_template_kwargs={"thinking": True}
                )
                assert num_asked > 0, (text, options)
                ours, num_asked = await reader.read(text, **options)
                assert ours == theirs, (text, options)
                # Arguments are streamed by the engine, and it reads calls that are broken off.
                called = "<tool_call>" in text and options == CALLS
                left = called and (stream or not text.endswith("</tool_call>"))
                assert (num_asked > 0) == left, (text, options)
            async with (
                aiohttp.ClientSession() as http,
                http.get(f"{gateway.url}/metrics", headers=API) as got,
            ):
                metrics = await got.text()
            assert "insitu_gateway_calls_recorded_total" in metrics
            assert "shortcut=" not in metrics, "a difference was found"


class Reader:
    """Lets the engine say texts, and reads the answers as a client does."""

    def __init__(self, gateway: Running, engine: ReplayingEngine, stream: bool) -> None:
        self._gateway, self._engine, self._stream = gateway, engine, stream
        self._tokenizer: Any = AutoTokenizer.from_pretrained(tiny())

    async def read(self, text: str, **options: Any) -> tuple[dict[str, Any], int]:
        """Return the message, and how many requests it took the engine to read it."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        self._engine.output = [*ids, self._tokenizer.eos_token_id]
        before = len(self._engine.calls_to("/v1/chat/completions/derender"))
        message = await whole_message(self._gateway, self._stream, options)
        return message, len(self._engine.calls_to("/v1/chat/completions/derender")) - before


async def whole_message(gateway: Running, stream: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Return content and calls of an answer, without the ids of the calls."""
    body: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "look"}],
        "max_tokens": 200,
    } | options
    extra: Any = {"extra_body": {key: body.pop(key) for key in ("chat_template_kwargs",) if key in body}}
    client: Any = gateway.client()
    if not stream:
        choice = (await client.chat.completions.create(**body, **extra)).choices[0]
        functions = [
            (call.function.name, call.function.arguments) for call in choice.message.tool_calls or []
        ]
        return {"content": choice.message.content or "", "calls": functions, "end": choice.finish_reason}
    content, calls, end = "", dict[int, list[str]](), None
    async for chunk in await client.chat.completions.create(**body, **extra, stream=True):
        delta, end = chunk.choices[0].delta, chunk.choices[0].finish_reason
        content += delta.content or ""
        for call in delta.tool_calls or []:
            name_and_arguments = calls.setdefault(call.index, ["", ""])
            name_and_arguments[0] += call.function.name or ""
            name_and_arguments[1] += call.function.arguments or ""
    return {"content": content, "calls": [tuple(one) for one in calls.values()], "end": end}
