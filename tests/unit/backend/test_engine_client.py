"""The engine is sent what vLLM's protocol asks for, and its answers are read by their model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from insitu.access import engine_door
from insitu.backend.fleet import replica
from insitu.backend.fleet.replica import EngineClient, ReplicaActor
from insitu.backend.plan.engine import EngineSettings
from insitu.backend.plan.settings import Deadlines
from insitu.errors import DeadlineExceeded, UpstreamError


class StandinEngine:
    """Records requests and answers as it was told to, by path."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.answers: dict[str, Any] = {"/collective_rpc": {"results": [[], []]}}
        self.hangs_at = ""

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == self.hangs_at:
            await asyncio.Event().wait()
        body = await request.json() if request.can_read_body else None
        self.requests.append((request.path_qs, body))
        return web.json_response(self.answers.get(request.path, {}))


@pytest.fixture
async def standin() -> StandinEngine:
    return StandinEngine()


@pytest.fixture
async def engine(standin: StandinEngine) -> AsyncIterator[EngineClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", standin.handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    async with aiohttp.ClientSession() as http:
        yield EngineClient(http, f"http://{host}:{port}")
    await runner.cleanup()


@pytest.mark.parametrize(
    ("deadline", "path", "ask"),
    [
        ("score", "/v1/completions", lambda engine: engine.score("run@1", [[1, 2]])),
        ("publish", "/v1/load_lora_adapter", lambda engine: engine.load_adapter("run@1", Path("/w"))),
        ("publish", "/collective_rpc", lambda engine: engine.reload_weights(Path("/w"), "run@1")),
        ("handover", "/sleep", lambda engine: engine.sleep()),
        ("handover", "/wake_up", lambda engine: engine.wake_up("weights")),
    ],
)
async def test_an_engine_that_hangs_is_given_up(
    standin: StandinEngine,
    engine: EngineClient,
    deadline: str,
    path: str,
    ask: Callable[[EngineClient], Awaitable[object]],
) -> None:
    standin.hangs_at = path
    hasty = EngineClient(engine._http, engine.url, replace(Deadlines(), **{deadline: 0.05}))
    async with asyncio.timeout(30):
        with pytest.raises(DeadlineExceeded, match=rf"did not answer {path}.* in 0.05 s"):
            await ask(hasty)


async def test_requests_are_those_of_vllm(standin: StandinEngine, engine: EngineClient) -> None:
    standin.answers["/wake_up"] = {"status": "awake", "tags": ["kv_cache"]}
    await engine.load_adapter("run@1", Path("/weights/1"))
    await engine.unload_adapter("run@1")
    await engine.reload_weights(Path("/weights/2"), "run@2")
    await engine.sleep()
    await engine.wake_up("weights")
    await engine.wake_up("kv_cache")
    assert standin.requests == [
        ("/collective_rpc", {"method": "tensors_left_out", "kwargs": {"directory": "/weights/1"}}),
        ("/v1/load_lora_adapter", {"lora_name": "run@1", "lora_path": "/weights/1"}),
        ("/v1/unload_lora_adapter", {"lora_name": "run@1"}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/weights/2"}}),
        ("/reset_prefix_cache", None),
        ("/update_weight_version", {"new_version": "run@2"}),
        ("/sleep?level=1", None),
        ("/wake_up?tags=weights", None),
        ("/wake_up?tags=kv_cache", None),
    ]


async def test_the_engine_has_the_weights_that_it_took(standin: StandinEngine, engine: EngineClient) -> None:
    assert engine.versions == []
    await engine.set_version("base")
    await engine.load_adapter("run@1", Path("/weights/1"))
    await engine.load_adapter("run@2", Path("/weights/2"))
    await engine.unload_adapter("run@1")
    assert engine.versions == ["base", "run@2"]
    hasty = EngineClient(engine._http, engine.url, replace(Deadlines(), publish=0.05))
    await hasty.set_version("base")
    standin.hangs_at = "/collective_rpc"
    with pytest.raises(DeadlineExceeded):
        await hasty.reload_weights(Path("/weights/3"), "run@3")
    with pytest.raises(DeadlineExceeded):
        await hasty.load_adapter("run@3", Path("/weights/3"))
    assert hasty.versions == [], "its weights are not known"


async def test_engine_that_stays_asleep_is_an_error(standin: StandinEngine, engine: EngineClient) -> None:
    standin.answers["/wake_up"] = {"status": "sleeping", "tags": ["weights"]}
    await engine.wake_up("weights")  # the KV cache is still to come
    with pytest.raises(UpstreamError, match="still sleeping after /wake_up"):
        await engine.wake_up("kv_cache")


async def test_warming_up_names_no_setting_that_it_leaves_to_the_engine(
    standin: StandinEngine, engine: EngineClient
) -> None:
    settings = SimpleNamespace(served_name="tiny", max_model_len=16, max_num_seqs=2)
    await engine.warm_up(cast(EngineSettings, settings), 5)
    common = {"model": "tiny", "max_tokens": 8, "logprobs": 1, "ignore_eos": True}
    kernels, batch = [body for _, body in standin.requests]
    assert kernels == common | {"prompt": [[1, 2, 3], [1, 2]], "prompt_logprobs": 0}
    assert batch == common | {"prompt": [[1, *[2] * 7], [2, *[2] * 7]]}


async def test_scores_are_in_the_order_of_the_sequences(standin: StandinEngine, engine: EngineClient) -> None:
    def choice(index: int, *rows: tuple[int, float]) -> dict[str, Any]:
        scored = [{str(token): {"logprob": value, "rank": 1}} for token, value in rows]
        return {"index": index, "text": "x", "prompt_logprobs": [None, *scored]}

    standin.answers["/v1/completions"] = {"choices": [choice(1, (4, -3)), choice(0, (2, -0.5), (3, -1.5))]}
    assert await engine.score("tiny", [[1, 2, 3], [1, 4]]) == [[-0.5, -1.5], [-3.0]]
    ((_, body),) = standin.requests
    assert body == {
        "model": "tiny",
        "prompt": [[1, 2, 3], [1, 4]],
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": 0,
    }


async def test_models_are_read_and_other_answers_are_named(
    standin: StandinEngine, engine: EngineClient
) -> None:
    standin.answers["/v1/models"] = {"object": "list", "data": [{"id": "tiny", "max_model_len": 16}]}
    assert await engine.adapters() == {"tiny"}
    standin.answers["/v1/models"] = {"data": [{}]}
    with pytest.raises(UpstreamError, match=r"data\.0\.id: Field required"):
        await engine.adapters()


def test_an_engine_is_started_behind_its_door(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its port is open to every user of the machine, and its key is on no command line."""
    started: list[Any] = []
    monkeypatch.setattr(replica, "spawn", lambda *given: started.append(given))
    settings = EngineSettings("m", "m", "cpu", "float32", "adapter")
    key = engine_door.new_key()
    ReplicaActor(settings, str(tmp_path / "log"), {}, key, None)
    [(command, _, environment)] = started
    assert command[command.index("--middleware") + 1] == "insitu.access.engine_door.EngineDoor"
    assert environment[engine_door.VARIABLE] == key
    assert not [part for part in command if key in part]
