"""Every field of vLLM's own requests is honoured by the protocol of that name, rejected or without effect."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from insitu.gateway.protocols.chat import ChatProtocol
from insitu.gateway.protocols.completions import CompletionsProtocol
from insitu.gateway.protocols.messages import MessagesProtocol
from insitu.gateway.protocols.parts import UNHONOURED
from insitu.gateway.protocols.responses import ResponsesProtocol

REQUESTS: list[tuple[Any, str, str]] = [
    (ChatProtocol, "openai.chat_completion.protocol", "ChatCompletionRequest"),
    (CompletionsProtocol, "openai.completion.protocol", "CompletionRequest"),
    (ResponsesProtocol, "openai.responses.protocol", "ResponsesRequest"),
    (MessagesProtocol, "anthropic.protocol", "AnthropicMessagesRequest"),
]
WITHOUT_EFFECT = {"priority", "request_id", "session_id", "stream_interval"}
"""They say when and how an answer comes, and not which."""
REJECTED_WITH_A_REASON = {"previous_response_id"}


@pytest.mark.parametrize(("protocol", "module", "name"), REQUESTS, ids=[name for *_, name in REQUESTS])
def test_every_field_of_vllms_requests_has_a_place(protocol: Any, module: str, name: str) -> None:
    request = getattr(importlib.import_module(f"vllm.entrypoints.{module}"), name)
    assert "model" in request.model_fields
    others = set(request.model_fields) - protocol.fields - UNHONOURED - REJECTED_WITH_A_REASON
    assert others <= WITHOUT_EFFECT
