"""A field that nothing here knows reaches no engine, is counted, and is named once per client; one that is
known to change the answer, and that cannot be honoured, is rejected."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types import message_create_params as anthropic_messages
from anthropic.types.beta import message_create_params as anthropic_beta
from openai.types import completion_create_params as openai_completions
from openai.types.chat import completion_create_params as openai_chat
from openai.types.responses import response_create_params as openai_responses

from insitu.errors import InvalidRequest
from insitu.gateway.protocols.base import CallProtocol
from insitu.gateway.protocols.chat import ChatProtocol
from insitu.gateway.protocols.completions import CompletionsProtocol
from insitu.gateway.protocols.messages import MessagesProtocol
from insitu.gateway.protocols.parts import UNHONOURED
from insitu.gateway.protocols.responses import ResponsesProtocol
from insitu.gateway.shared.counts import Counts
from insitu.gateway.shared.settings import Limits
from insitu.gateway.shared.unknown_fields import UnknownFields
from tests.unit.gateway.conftest import API, GatewayUnderTest
from tests.unit.gateway.test_odd_requests import ITEM_REFERENCE, REQUESTS

CLIENTS: list[tuple[CallProtocol, list[Any]]] = [
    (ChatProtocol(), [openai_chat.CompletionCreateParamsStreaming]),
    (CompletionsProtocol(), [openai_completions.CompletionCreateParamsStreaming]),
    (ResponsesProtocol(), [openai_responses.ResponseCreateParamsStreaming]),
    (
        MessagesProtocol(),
        [anthropic_messages.MessageCreateParamsStreaming, anthropic_beta.MessageCreateParamsStreaming],
    ),
]
WITHOUT_EFFECT = {"access_programs", "fallback_credit_token", "moderation", "prediction"}
"""Of a vendor's service, and dropped as the unknown is: no answer would be another one."""
REJECTED_WITH_A_REASON = {"conversation", "previous_response_id"}
ADDED = "not_known_here"
OPAQUE = {"parameters", "schema", "input_schema", "input", "logit_bias", "metadata"}
OPAQUE |= {"response_format", "chat_template_kwargs"}
"""What these hold is the client's own, and is passed on whole."""


@pytest.mark.parametrize(("protocol", "kinds"), CLIENTS, ids=lambda value: getattr(value, "name", ""))
def test_every_field_of_todays_clients_is_honoured_rejected_or_without_effect(
    protocol: CallProtocol, kinds: list[Any]
) -> None:
    fields = {name for kind in kinds for name in kind.__required_keys__ | kind.__optional_keys__}
    assert len(fields) > 10
    assert fields - protocol.fields - UNHONOURED - REJECTED_WITH_A_REASON <= WITHOUT_EFFECT


def with_a_field_more(value: Any, key: str = "") -> Iterator[Any]:
    """Yield the value with an unknown field in each object that it holds."""
    if isinstance(value, dict) and key not in OPAQUE:
        yield value | {ADDED: {"a": 1}}
        for name, inner in value.items():
            yield from (value | {name: each} for each in with_a_field_more(inner, name))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from ([*value[:place], each, *value[place + 1 :]] for each in with_a_field_more(inner))


def requests() -> list[Any]:
    return [
        pytest.param(protocol, body, id=f"{protocol.name}-{place}")
        for protocol, body in REQUESTS
        if ITEM_REFERENCE not in body.get("input", [])
        for place, body in enumerate(with_a_field_more({"model": "tiny", **body}))
    ]


@pytest.mark.parametrize(("protocol", "body"), requests())
def test_the_unknown_changes_nothing_that_the_engine_gets(protocol: CallProtocol, body: Any) -> None:
    plain = json.loads(json.dumps(body), object_hook=without)
    counts = Counts()
    fields = UnknownFields(counts)
    with fields.of("me", protocol.name):
        expected = protocol.parse(plain, Limits())
    before = counts.unknown_fields[protocol.name]
    with fields.of("me", protocol.name):
        parsed = protocol.parse(copy.deepcopy(body), Limits())
    assert counts.unknown_fields[protocol.name] == before + before + 1
    assert parsed.body == expected.body
    assert ADDED not in json.dumps(parsed.body)


def without(part: dict[str, Any]) -> dict[str, Any]:
    part.pop(ADDED, None)
    return part


async def test_a_gateway_counts_the_unknown_and_names_it_once(
    gateway: GatewayUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="insitu.gateway.shared.unknown_fields"):
        for _ in range(3):
            status, _, _ = await gateway.post(not_known_here=1, user="somebody")
            assert status == 200
    assert [record.message for record in caplog.records if ADDED in record.message] == [
        "the key 'INSITU_API_KEY' sends 'not_known_here' in requests of the protocol chat: the field is "
        "unknown here, and no engine gets it"
    ]
    async with gateway.session.get(f"{gateway.url}/metrics", headers=API) as metrics:
        text = await metrics.text()
    assert 'insitu_gateway_unknown_fields_total{protocol="chat"} 3' in text


def test_a_client_with_ever_new_fields_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    counts = Counts()
    fields = UnknownFields(counts)
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            with fields.of("noisy", "chat"):
                ChatProtocol().parse(body | {f"x{number}\n" * 50: 1}, Limits())
        with fields.of("other", "chat"):
            ChatProtocol().parse(body | {"y": 1}, Limits())
    assert counts.unknown_fields == {"chat": 1001}
    lines = [record.message for record in caplog.records]
    assert len(lines) == 34
    assert "more unknown fields" in lines[-2]
    assert "'other' sends 'y'" in lines[-1]
    assert not any("\n" in line or len(line) > 300 for line in lines)


@pytest.mark.parametrize(
    "neutral", [{"modalities": ["text"]}, {"verbosity": "medium"}, {"audio": None, "functions": None}]
)
def test_what_changes_nothing_is_no_reason_to_reject(neutral: dict[str, Any]) -> None:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    assert ChatProtocol().parse(body | neutral, Limits()).body == ChatProtocol().parse(body, Limits()).body
    with pytest.raises(InvalidRequest, match="modalities"):
        ChatProtocol().parse(body | {"modalities": ["text", "audio"]}, Limits())
