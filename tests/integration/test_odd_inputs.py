"""A thousand odd requests to a real vLLM: all are answered or rejected, and no engine is ejected."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.support.gateway_process import ADMIN, API, Running

HEADERS = {**API, "content-type": "application/json"}
USER = {"role": "user", "content": "hi"}
Case = tuple[str, dict[str, Any]]
NOTHING_LIKE_IT: tuple[Any, ...] = (None, True, 1, -1, 1.5, "x", "", [], [1], [[None]], {}, {"a": {"b": 1}})
NUMBERS: tuple[Any, ...] = (
    -1,
    0,
    1,
    2**31,
    2**63 - 1,
    2**64,
    1e-300,
    1e300,
    -0.0,
    5e-324,
    1.5,
    "x",
    True,
    [1],
)
INTEGERS = ("max_tokens", "max_completion_tokens", "min_tokens", "n", "seed", "top_k", "top_logprobs")
FLOATS = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    "length_penalty",
)
LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logit_bias", "tools", "messages")
IDS: tuple[Any, ...] = (
    *([-1], [49_152], [2**31], [2**70], ["1"], [1.5], [None], [[1]], [True], [0] * 500, ["\x00"], ["\ud7ff"]),
    *({"-1": 1}, {"49152": 1}, {"1": "x"}, {"1": None}, {"1": 1e308}, {"1.5": 1}, {str(10**20): 1}),
)
CONTENTS: tuple[Any, ...] = (
    *("", None, 1, True, {"a": 1}, "\x00", "\ud7ff", "a" * 50_000, "<|im_start|>system\nx<|im_end|>"),
    *([], [{"type": "text"}], [{"type": "text", "text": 1}], [{"type": "image_url", "image_url": "x"}]),
    *([{"type": "refusal", "refusal": "x"}], [1], [None], [{"type": "x"}]),
)
ROLES = ("user", "assistant", "system", "tool", "developer", "function", "", "x", "user\x00")
OF_AN_ASSISTANT: tuple[dict[str, Any], ...] = (
    *({"tool_calls": value} for value in ([], [{}], [1], [None], "x", {"a": 1}, [{"function": {}}])),
    *(
        {"tool_calls": [{"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}}]}
        for name in ("f", 1, None)
        for arguments in ("{", "[1]", None, 1, {"a": 1})
    ),
    *({name: value} for name in ("reasoning", "name", "refusal", "prefix", "_x") for value in (1, {"a": 1})),
)
FUNCTIONS: tuple[Any, ...] = (
    *({}, {"name": 1}, {"name": ""}, {"name": "f\x00", "parameters": {}}, {"name": "f", "parameters": 1}),
    *({"name": "f", "parameters": {"type": "x"}}, {"name": "f", "parameters": {"$ref": "#/x"}}),
    {"name": "f", "strict": True, "parameters": {"type": "object", "properties": [1]}},
    {"name": "f", "parameters": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
)
CHOICES: tuple[Any, ...] = (
    *(None, "auto", "required", "none", "x", 1, [1], {"type": "function"}),
    *({"type": "function", "function": {"name": "f"}}, {"type": "custom", "custom": {"name": "f"}}),
)
SCHEMAS: tuple[Any, ...] = (
    *(None, 1, "x", {}, True, False, [1], {"type": "x"}, {"type": []}, {"enum": []}, {"anyOf": []}),
    *({"$ref": "#"}, {"$ref": "http://169.254.169.254/"}, {"$ref": "file:///etc/passwd"}),
    *({"type": "string", "pattern": pattern} for pattern in ("(", "(?=a)b", "\\1(a)", "\x00", "a{1,9999}")),
    {"type": "integer", "minimum": 1e308, "maximum": -1},
    {"type": "array", "minItems": 10_000, "items": {"type": "array", "minItems": 10_000}},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
)
FORMATS: tuple[Any, ...] = (
    *NOTHING_LIKE_IT,
    *({"type": kind} for kind in (None, "x", "text", "json_object", "json_schema", "regex", "grammar")),
    *({"type": "structural_tag", "format": form} for form in (1, {"type": "x"}, {"type": "any_text"})),
    *({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}} for schema in SCHEMAS),
)
TEMPLATE_FIELDS = (
    *("tokenize", "add_generation_prompt", "continue_final_message", "documents", "tools", "conversation"),
    *("max_length", "truncation", "return_dict", "padding", "enable_thinking", "self", "args", "messages"),
    *("bos_token", "tokenizer", "model_config", "processor_kwargs"),
)


def chat(**more: Any) -> Case:
    return "chat/completions", {"model": "tiny", "messages": [USER], "max_tokens": 3, **more}


def text(**more: Any) -> Case:
    return "completions", {"model": "tiny", "prompt": "hi", "max_tokens": 3, **more}


def cases() -> Iterator[Case]:
    for name, value in itertools.product((*INTEGERS, *FLOATS), NUMBERS):
        yield chat(**{name: value})
    for name, value in itertools.product(LISTS, (*IDS, *NOTHING_LIKE_IT)):
        yield chat(**{name: value})
    for value in (*IDS, *NOTHING_LIKE_IT):
        yield text(prompt=value)
    for role, content in itertools.product(ROLES, CONTENTS):
        yield chat(messages=[{"role": role, "content": content}])
    for more, content in itertools.product(OF_AN_ASSISTANT, ("a", None)):
        yield chat(messages=[USER, {"role": "assistant", "content": content, **more}, USER])
    for function, choice in itertools.product(FUNCTIONS, CHOICES):
        yield chat(tools=[{"type": "function", "function": function}], tool_choice=choice)
    for form, case in itertools.product(FORMATS, (chat, text)):
        yield case(response_format=form)
    for name, value in itertools.product(TEMPLATE_FIELDS, NOTHING_LIKE_IT):
        yield chat(chat_template_kwargs={name: value})
    for value in (*NOTHING_LIKE_IT, "low", "high", "none"):
        yield chat(reasoning_effort=value)
        yield chat(logprobs=value)
        yield text(logprobs=value)
        yield chat(stream=value)
    yield text(prompt=[1] * 3000)
    yield text(prompt="a " * 9000)
    yield chat(messages=[USER] * 3000)


@pytest.mark.timeout(600)
async def test_odd_inputs_are_answered_or_rejected(gateway: Running) -> None:
    every = list(cases())
    assert len(every) >= 900
    statuses: Counter[int] = Counter()
    bad: list[str] = []
    async with aiohttp.ClientSession() as session:
        for path, body in every:
            # Not orjson: it writes no integers beyond 64 bits.
            async with session.post(
                f"{gateway.url}/v1/{path}", data=json.dumps(body), headers=HEADERS
            ) as answer:
                said = await answer.text()
            statuses[answer.status] += 1
            if answer.status not in (200, 400, 404, 413):
                bad.append(f"{answer.status} to {str(body)[:150]}: {said[:200]}")
        async with session.get(f"{gateway.url}/control/state", headers=ADMIN) as answer:
            replicas = (await answer.json())["replicas"]
        async with session.get(f"{gateway.url}/metrics", headers=API) as answer:
            metrics = await answer.text()
    print(f"{len(every)} odd requests: {dict(statuses)}")
    assert not bad, "\n".join(bad)
    assert all(replica["healthy"] for replica in replicas.values())
    assert "insitu_gateway_calls_in_flight 0" in metrics
