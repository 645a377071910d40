"""What an exception means, for the libraries that agents really use."""

from __future__ import annotations

import urllib.request
from typing import Any

import aiohttp
import httpx
import openai
import pytest

from insitu.errors import InvalidRequest, Overloaded, Unavailable, describe, one_line
from insitu.gateway.engines.upstream import Engine
from insitu.gateway.shared.settings import Limits
from insitu.types import Ending
from insitu.workflow.classify import ending_of

REQUEST = httpx.Request("POST", "http://g/v1/chat/completions")
# vLLM's own words for a prompt that is too long, in the three places where it checks.
OVERFLOWS = (
    "This model's maximum context length is 2048 tokens. However, your request has 2060 input tokens.",
    "The decoder prompt (length 2060) is longer than the maximum model length of 2048.",
    "The decoder prompt (length 2048) plus the number of requested output tokens (at least 1) is longer than "
    "the maximum model length of 2048. Make sure that `max_model_len` is no smaller than the number of text",
)


def api_status_error(status: int, body: Any) -> openai.APIStatusError:
    """As openai raises it."""
    response = httpx.Response(status, json=body, request=REQUEST)
    return openai.OpenAI(api_key="k")._make_status_error_from_response(response)


async def gateway_error(words: str) -> dict[str, Any]:
    """The body that a client gets when an engine answers 400 with these words."""
    engine = Engine("http://e", Limits())
    refused = engine._failure("/v1/x", 400, httpx.Response(400, json={"error": {"message": words}}).content)
    await engine.close()
    assert isinstance(refused, InvalidRequest)
    return refused.to_wire()


@pytest.mark.parametrize("words", OVERFLOWS)
async def test_too_long_a_conversation_as_the_gateway_words_it(words: str) -> None:
    body = await gateway_error(words)
    assert ending_of(api_status_error(400, body)) is Ending.CONTEXT_OVERFLOW
    response = httpx.Response(400, json=body, request=REQUEST)
    plain = httpx.HTTPStatusError("Client error '400 Bad Request'", request=REQUEST, response=response)
    assert ending_of(plain) is Ending.CONTEXT_OVERFLOW


def test_another_400_is_the_agents_own_fault() -> None:
    assert ending_of(api_status_error(400, {"error": {"message": "`n` is 3"}})) is Ending.TOOL_ERROR
    assert ending_of(api_status_error(404, {"error": {"message": OVERFLOWS[0]}})) is Ending.TOOL_ERROR
    assert ending_of(ValueError(OVERFLOWS[0])) is Ending.TOOL_ERROR


@pytest.mark.parametrize(
    "error",
    [
        openai.APIConnectionError(request=REQUEST),
        openai.APITimeoutError(request=REQUEST),
        api_status_error(500, {}),
        api_status_error(503, {}),
        api_status_error(429, {}),
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        aiohttp.ServerDisconnectedError(),
        aiohttp.ClientOSError(111, "refused"),
        aiohttp.ClientResponseError(None, (), status=502),  # type: ignore[arg-type]
        ConnectionRefusedError(111, "refused"),
        Unavailable("held"),
        Overloaded("full"),
    ],
    ids=repr,
)
def test_trouble_on_the_way_is_infrastructure(error: Exception) -> None:
    assert ending_of(error) is Ending.INFRASTRUCTURE


def test_urllib_is_understood_through_its_cause() -> None:
    with pytest.raises(OSError) as caught:
        urllib.request.urlopen("http://127.0.0.1:9/", timeout=2)
    assert ending_of(caught.value) is Ending.INFRASTRUCTURE


def test_the_chain_is_followed() -> None:
    def through_cause() -> None:
        try:
            raise httpx.ConnectError("refused")
        except httpx.ConnectError as error:
            raise RuntimeError("my agent failed") from error

    def through_context() -> None:
        try:
            through_cause()
        except RuntimeError:
            raise KeyError("while handling")  # noqa: B904 - what sloppy agents do

    with pytest.raises(KeyError) as caught:
        through_context()
    assert ending_of(caught.value) is Ending.INFRASTRUCTURE
    group = ExceptionGroup("tasks", [ValueError("x"), caught.value])
    assert ending_of(group) is Ending.INFRASTRUCTURE
    assert describe(group) == "ValueError: x"


def test_a_chain_in_a_circle_ends() -> None:
    first, second = ValueError("1"), ValueError("2")
    first.__cause__, second.__cause__ = second, first
    assert ending_of(first) is Ending.TOOL_ERROR


def test_reasons_are_one_short_line() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert describe(ValueError("a\nb\tc\x1b[31m\ud800")) == "ValueError: a b c\\x1b[31m\\ud800"
    assert describe(KeyError()) == "KeyError"
    assert describe(Broken()) == "Broken: (its message cannot be shown: RuntimeError)"
    long = describe(ValueError("x" * 100_000))
    assert len(long) == 500
    assert long.endswith("…")
    assert one_line("é 日本 😀") == "é 日本 😀"


def test_an_error_of_insitu_is_described_by_its_message_and_its_hint() -> None:
    assert describe(InvalidRequest("llms has no `x`", hint="known: y")) == "llms has no `x`; known: y"
    assert describe(ExceptionGroup("tasks", [Overloaded("full")])) == "full"


def test_attributes_that_raise_are_passed_over() -> None:
    class Odd(Exception):
        @property
        def status_code(self) -> int:
            raise RuntimeError("not read yet")

    assert ending_of(Odd()) is Ending.TOOL_ERROR


# The agent's own limit of steps


@pytest.mark.parametrize("name", ["GraphRecursionError", "MaxTurnsExceeded", "UsageLimitExceeded"])
def test_the_limit_of_a_framework_is_told_by_the_name_of_its_class(name: str) -> None:
    """tests/frameworks/test_step_limits.py has the frameworks' own classes."""
    assert ending_of(type(name, (Exception,), {})("too many steps")) is Ending.STEP_LIMIT
    assert ending_of(type("Mine", (type(name, (RuntimeError,), {}),), {})()) is Ending.STEP_LIMIT


def test_llamaindex_says_its_limit_in_words_alone() -> None:
    class WorkflowRuntimeError(Exception):
        """As in LlamaIndex."""

    text = "Max iterations of 20 reached! Either something went wrong, or you can increase the max iterations"
    assert ending_of(WorkflowRuntimeError(text)) is Ending.STEP_LIMIT
    assert ending_of(WorkflowRuntimeError("my own: Max iterations of 20 reached")) is Ending.TOOL_ERROR
