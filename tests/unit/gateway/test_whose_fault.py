"""An answer that cannot be read is the engine's fault; an error in the gateway's own code never is."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
import pytest
import pytest_asyncio
from aiohttp import web

from insitu.gateway.engines.routes import Target
from insitu.gateway.engines.sample import Generated, partial
from insitu.gateway.protocols.base import StopTrimmer
from insitu.gateway.protocols.chat import ChatProtocol, ChatStream
from insitu.gateway.recording.recorder import Recorder
from insitu.gateway.shared.faults import UnexpectedShape, reading
from insitu.gateway_client import RolloutRecord
from tests.support.standin_engine import Behaviour, StandinEngine
from tests.unit.gateway.conftest import (
    API,
    MESSAGES,
    GatewayUnderTest,
    StartGateway,
    starting_gateways,
    until,
)
from tests.unit.gateway.test_tally import adds_up, record_of

pytestmark = pytest.mark.timeout(60)
on_shared = pytest.mark.asyncio(loop_scope="module")
PATHS = ["chat/completions", "completions", "responses", "messages"]
ASKED: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": MESSAGES},
    "completions": {"prompt": "hello"},
    "responses": {"input": "hello"},
    "messages": {"messages": MESSAGES, "max_tokens": 9},
}
GENERATE = "/inference/v1/generate"
RENDER, DERENDER = "/v1/chat/completions/render", "/v1/chat/completions/derender"


class WrongEngine(StandinEngine):
    """Answers on one path with something else, after some good answers."""

    def __init__(self) -> None:
        super().__init__(Behaviour(chunk_seconds=0.02))
        self.wrong: dict[str, object] = {}
        self.num_good = 0

    def instead(self, path: str) -> web.Response | None:
        if path not in self.wrong:
            return None
        self.num_good -= 1
        if self.num_good >= 0:
            return None
        return web.json_response(self.wrong[path])

    async def _render_chat(self, request: web.Request) -> web.Response:
        return self.instead(request.path) or await super()._render_chat(request)

    async def _render_completion(self, request: web.Request) -> web.Response:
        return self.instead(request.path) or await super()._render_completion(request)

    async def _derender_chat(self, request: web.Request) -> web.Response:
        return self.instead(request.path) or await super()._derender_chat(request)

    async def _derender_completion(self, request: web.Request) -> web.Response:
        return self.instead(request.path) or await super()._derender_completion(request)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if GENERATE not in self.wrong:
            return await super()._generate(request)
        answer = orjson.dumps(self.wrong[GENERATE])
        if not orjson.loads(await request.read())["stream"]:
            return web.Response(body=answer, content_type="application/json")
        return web.Response(body=b"data: " + answer + b"\n\ndata: [DONE]\n\n")


@pytest.fixture
async def wrong(start_gateway: StartGateway) -> GatewayUnderTest:
    return await start_gateway(make_engine=WrongEngine)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_wrong() -> AsyncIterator[GatewayUnderTest]:
    """A gateway for many tests: each has a rollout of its own and says what is wrong."""
    async with starting_gateways() as start:
        yield await start(make_engine=WrongEngine)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[GatewayUnderTest]:
    """A gateway for many tests, each with a rollout of its own."""
    async with starting_gateways() as start:
        yield await start()


_numbers = itertools.count()


@pytest.fixture
def rollout() -> str:
    """A rollout that no other test has."""
    return f"ro-{next(_numbers)}"


async def call(
    gateway: GatewayUnderTest, path: str, stream: bool, rollout: str = "ro", **more: Any
) -> tuple[int, dict[str, Any], bool]:
    """Status, the last JSON object of the answer, and whether a stream had begun."""
    body = orjson.dumps({"model": "tiny", "stream": stream} | ASKED[path] | more)
    url = f"{gateway.url}/rollouts/{rollout}/v1/{path}"
    async with gateway.session.post(url, data=body, headers=API) as got:
        data = await got.read()
        assert b"[DONE]" not in data
        last = orjson.loads(data.removesuffix(b"\n\n").rsplit(b"data: ", 1)[-1])
        return got.status, last, got.content_type == "text/event-stream"


async def settled(gateway: GatewayUnderTest, rollout: str = "ro") -> RolloutRecord:
    """Nothing is left of any call: not here, not in the engine, not in the counts."""

    async def idle() -> bool:
        state = await gateway.state()
        return state["in_flight_total"] == 0 and state["replicas"]["replica-0"]["in_flight"] == 0

    await until(idle, "no call is in flight")
    await until(lambda: gateway.engine.num_generating == 0, "the engine is idle")
    record = await record_of(gateway, rollout)
    assert adds_up(record)
    assert record.under_way == 0
    assert not [task for task in asyncio.all_tasks() if "_relay" in repr(task)]
    return record


TOOL_CALL = {"id": "t", "type": "function"}
MALFORMED: list[tuple[str, object]] = [
    (RENDER, {}),
    (RENDER, []),
    (RENDER, {"token_ids": 3, "sampling_params": {}}),
    (RENDER, {"token_ids": [1], "sampling_params": [1]}),
    (GENERATE, {}),
    (GENERATE, []),
    (GENERATE, 3),
    (GENERATE, {"choices": [{}]}),
    (GENERATE, {"choices": 3}),
    (DERENDER, {}),
    (DERENDER, []),
    (
        DERENDER,
        {"choices": [{"message": "said"}], "chunk": {"choices": [{"delta": "said"}]}, "stream_state": {}},
    ),
    (DERENDER, {"choices": [], "chunk": {"choices": []}, "stream_state": {}}),
    (DERENDER, {"chunk": {"choices": [{"delta": {"content": 3}}]}, "stream_state": {}}),
    (DERENDER, {"chunk": {"choices": [{"delta": {"tool_calls": [TOOL_CALL]}}]}, "stream_state": {}}),
    (DERENDER, {"chunk": {"choices": [{"delta": {"tool_calls": [3]}}]}, "stream_state": {}}),
]


@on_shared
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "answer"), MALFORMED, ids=[f"{p[-9:]} {a}" for p, a in MALFORMED])
async def test_an_answer_of_another_shape_is_the_engines_fault(
    shared_wrong: GatewayUnderTest, rollout: str, path: str, answer: object, stream: bool
) -> None:
    shared_wrong.engine.wrong = {path: answer}  # type: ignore[attr-defined]
    for protocol in ("chat/completions", "responses", "messages"):
        status, body, begun = await call(shared_wrong, protocol, stream, rollout)
        assert (status, begun) == (502, False)
        assert "The answer of replica-0 has an unexpected shape: " in body["error"]["message"]
    assert await shared_wrong.records() == []
    record = await settled(shared_wrong, rollout)
    assert (record.calls, record.unrecorded) == ([], {"failed": 3})


@on_shared
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "answer", [{}, [], [{}], {"choices": [{"text": 3}], "chunk": {"choices": [{"text": 3}]}}]
)
@pytest.mark.parametrize("path", ["render", "derender"])
async def test_so_are_those_of_plain_completions(
    shared_wrong: GatewayUnderTest, rollout: str, path: str, answer: object, stream: bool
) -> None:
    shared_wrong.engine.wrong = {f"/v1/completions/{path}": answer}  # type: ignore[attr-defined]
    status, body, begun = await call(shared_wrong, "completions", stream, rollout)
    assert (status, begun, "unexpected shape" in body["error"]["message"]) == (502, False, True)
    await settled(shared_wrong, rollout)


@pytest.mark.parametrize("protocol", ["responses", "messages"])
async def test_so_is_a_tool_call_without_a_function(wrong: GatewayUnderTest, protocol: str) -> None:
    message = {"role": "assistant", "tool_calls": [TOOL_CALL]}
    wrong.engine.wrong = {DERENDER: {"choices": [{"message": message}]}}  # type: ignore[attr-defined]
    status, body, _ = await call(wrong, protocol, stream=False)
    assert (status, "unexpected shape: KeyError: 'function'" in body["error"]["message"]) == (502, True)
    await settled(wrong)


async def test_a_stream_that_turns_unreadable_ends_with_the_engines_fault(wrong: GatewayUnderTest) -> None:
    engine = wrong.engine
    assert isinstance(engine, WrongEngine)
    engine.wrong, engine.num_good = {DERENDER: {}}, 2  # the probe for parsers, and the first chunk
    status, body, begun = await call(wrong, "chat/completions", stream=True)
    assert (status, begun, body["error"]["type"]) == (200, True, "UpstreamError")
    assert "unexpected shape: KeyError: 'stream_state'" in body["error"]["message"]
    (record,) = await wrong.records()
    assert record.finish_reason == "broken"
    await settled(wrong)


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


ERRORS = [KeyError("boom"), IndexError("boom"), TypeError("boom"), ValueError("boom"), RuntimeError("boom")]


def check_internal(status: int, body: dict[str, Any], begun: bool, error: Exception, log: str) -> None:
    assert status == (200 if begun else 500)
    assert f"The request failed inside the gateway: {type(error).__name__}." in body["error"]["message"]
    assert "boom" not in body["error"]["message"]
    assert "unexpected shape" not in log + body["error"]["message"]
    assert "failed inside the gateway" in log
    assert "Traceback" in log
    assert f"{type(error).__name__}: " in log


@on_shared
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", PATHS)
async def test_an_error_of_the_recorder_is_the_gateways_own(
    shared: GatewayUnderTest,
    rollout: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    stream: bool,
    error: Exception,
) -> None:
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(Recorder, "submit", raising(error))
        status, body, begun = await call(shared, path, stream, rollout)
    assert begun is stream
    check_internal(status, body, begun, error, caplog.text)
    record = await settled(shared, rollout)
    assert (record.calls, record.unrecorded) == ([], {"failed": 1})
    assert (await shared.post(f"/rollouts/{rollout}/v1/chat/completions"))[0] == 200


@on_shared
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", PATHS)
async def test_an_error_after_reading_is_the_gateways_own(
    shared: GatewayUnderTest,
    rollout: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    stream: bool,
) -> None:
    error = KeyError("boom")
    monkeypatch.setattr(StopTrimmer, "feed", raising(error))
    with caplog.at_level(logging.ERROR):
        status, body, begun = await call(shared, path, stream, rollout)
    assert not begun
    check_internal(status, body, begun, error, caplog.text)
    assert (await settled(shared, rollout)).unrecorded == {"failed": 1}
    assert (await shared.state())["replicas"]["replica-0"]["healthy"]


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_a_stream_that_had_begun_ends_with_an_internal_error_and_a_broken_record(
    gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    error, chunk = TypeError("boom"), ChatStream.chunk

    async def fails_at_the_end(self: ChatStream, generated: Any, finished: Any) -> Any:
        events = await chunk(self, generated, finished)
        if finished is not None:
            raise error
        return events

    monkeypatch.setattr(ChatStream, "chunk", fails_at_the_end)
    gateway.engine.behaviour.chunk_seconds = 0.02
    with caplog.at_level(logging.ERROR):
        status, body, begun = await call(gateway, path, stream=True)
    assert begun
    check_internal(status, body, begun, error, caplog.text)
    (record,) = await gateway.records()
    assert (record.finish_reason, record.complete, record.output_ids[0]) == ("broken", False, 1000)
    await settled(gateway)


async def test_one_of_several_choices_fails_inside(
    gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, count = ChatProtocol.answer, 0

    async def fails_once(self: ChatProtocol, *given: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise ValueError("boom")
        return await answer(self, *given)

    monkeypatch.setattr(ChatProtocol, "answer", fails_once)
    status, body, _ = await call(gateway, "chat/completions", stream=False, n=3)
    assert (status, body["error"]["type"]) == (500, "InsituError")
    await settled(gateway)
    assert (await record_of(gateway)).unrecorded == {"failed": 3}


def test_only_reading_blames_the_engine() -> None:
    answer: Any = {"choices": []}
    with pytest.raises(UnexpectedShape, match="IndexError"), reading():
        answer["choices"][0]
    with pytest.raises(RuntimeError), reading():
        raise RuntimeError


def test_what_arrived_before_an_unreadable_part_is_kept() -> None:
    entries: list[Any] = [{"token_id": 5, "logprob": -0.5}, "nonsense"]
    spans: list[Any] = ["nonsense"]
    generated = Generated(token_ids=[5, 6], logprob_entries=entries, weight_versions=spans)
    sample = partial(generated, "broken", Target("tiny", None, 0, "tiny", "base"))
    assert (sample.output_ids, sample.logprobs, sample.version) == ([5], [-0.5], "")
