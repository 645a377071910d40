"""What a client may ask for, and what is refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from insitu.errors import InvalidRequest
from insitu.gateway.engines.sample import Sample
from insitu.gateway.protocols.base import Lane, StopTrimmer, generate_body
from insitu.gateway.protocols.chat import ChatProtocol
from insitu.gateway.protocols.completions import CompletionsProtocol
from insitu.gateway.protocols.request import NEUTRAL_SAMPLING, load_body
from insitu.gateway.shared.settings import Limits

LIMITS = Limits()
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_every_sampling_parameter_is_explicit() -> None:
    body = ChatProtocol().parse(CHAT, LIMITS).body
    assert {key: body[key] for key in NEUTRAL_SAMPLING} == NEUTRAL_SAMPLING
    assert "seed" not in body
    body = ChatProtocol().parse(CHAT | {"temperature": 0.3, "top_k": None, "seed": 4}, LIMITS).body
    assert (body["temperature"], body["top_k"], body["seed"]) == (0.3, -1, 4)


def test_a_field_without_a_value_is_not_there() -> None:
    body = ChatProtocol().parse(
        CHAT | {"functions": None, "audio": None, "prompt_cache_retention": "24h"}, LIMITS
    )
    assert body.body.keys() == ChatProtocol().parse(CHAT, LIMITS).body.keys()


def test_max_tokens_has_two_names_and_one_meaning() -> None:
    chat = ChatProtocol()
    assert chat.parse(CHAT | {"max_tokens": 7}, LIMITS).body["max_completion_tokens"] == 7
    both = CHAT | {"max_tokens": 7, "max_completion_tokens": 5}
    assert chat.parse(both, LIMITS).body["max_completion_tokens"] == 5
    assert "max_completion_tokens" not in chat.parse(CHAT, LIMITS).body
    assert CompletionsProtocol().parse({"model": "m", "prompt": "x"}, LIMITS).body["max_tokens"] == 16


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"prompt_logprobs": 5}, "prompt_logprobs"),
        ({"structured_outputs": {"regex": "(a+)+$"}}, "structured_outputs"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}
                ]
            },
            "image_url",
        ),
        ({"messages": [{"role": "user", "content": ["text"]}]}, "None"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "role"),
        ({"n": 17}, "`n` is 17"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"max_tokens": "7"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 100}, "100"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"model": None}, "model"),
        ({"stop": [1]}, "stop"),
        ({"stream_options": 3}, "stream_options"),
        ({"cache_salt": "a"}, "cache_salt"),
        ({"messages": [{"role": "user", "content": "x", "prefix": True}]}, r"messages\[0\].prefix"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        ChatProtocol().parse(CHAT | changes, LIMITS)


@pytest.mark.parametrize(
    "changes", [{"echo": True}, {"suffix": "x"}, {"best_of": 3}, {"prompt": ["a", "b"]}, {"prompt": []}]
)
def test_completions_refuse_what_they_do_not_do(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        CompletionsProtocol().parse({"model": "m", "prompt": "x"} | changes, LIMITS)


def test_the_engine_is_never_asked_for_the_logprobs_of_a_prompt() -> None:
    """They would tell what others sent, through the cache, and cost far more than the answer."""
    request = ChatProtocol().parse(CHAT | {"logprobs": True, "top_logprobs": 2}, LIMITS)
    engine: Any = None
    rendered = {"token_ids": [1, 2], "sampling_params": {"prompt_logprobs": 20, "logprobs": 99}}
    made = generate_body(Lane(engine, "m", "m", "call"), request, rendered)
    assert "prompt_logprobs" not in made.generate["sampling_params"]
    assert made.generate["sampling_params"]["logprobs"] == 2


def test_bodies_are_bounded() -> None:
    with pytest.raises(InvalidRequest, match="nested"):
        load_body(b'{"a":' + b"[" * 70 + b"]" * 70 + b"}", LIMITS)
    for data in (b"[]", b"{", b'{"a": NaN}', b'{"a": "\xff"}'):
        with pytest.raises(InvalidRequest):
            load_body(data, LIMITS)


def _trim(pieces: list[str], stop: str | None, **body: Any) -> list[str]:
    request = ChatProtocol().parse(CHAT | {"stop": ["END", "##"]} | body, LIMITS)
    trimmer, end = StopTrimmer(request), Sample([1], [-1.0], "stop", stop, "base")
    return [trimmer.feed(piece, end if i == len(pieces) - 1 else None) for i, piece in enumerate(pieces)]


def test_stop_strings_stay_out_of_the_text() -> None:
    assert "".join(_trim(["one tw", "o E", "ND x"], "END")) == "one two "
    assert "".join(_trim(["one END"], "END", include_stop_str_in_output=True)) == "one END"
    assert "".join(_trim(["E", "N", "D first, then END"], "END", min_tokens=5)) == "END first, then "
    assert "".join(_trim(["no E", "N stop"], None)) == "no EN stop"


def test_no_part_of_a_stop_string_goes_out_early() -> None:
    assert _trim(["text E", "N", "D"], "END") == ["text", " E"[:1], ""]
