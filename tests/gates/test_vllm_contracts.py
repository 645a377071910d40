"""insitu's side of the contract with vLLM against vLLM's own code: flags, routes, request models.

Two servers of vLLM without an engine core answer: one pretends GPUs and runs Model Runner V2, the other is a
CPU's and runs V1. The supervisor's client and the gateway talk to both.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from insitu.backend.fleet import replica
from insitu.backend.fleet.replica import EngineClient
from insitu.backend.plan.engine import Device, EngineSettings
from insitu.backend.plan.parsers import REASONING_RULES, TOOL_RULES
from insitu.gateway import engines, protocols
from insitu.system.processes import end_child, free_port
from insitu.testing.models import tiny
from insitu.trained.serve_command import adapter_command, merged_command
from tests.support.gateway_process import Running, start_gateway, wait_up
from tests.support.vllm_server import VllmServer

pytestmark = pytest.mark.timeout(300)

START_SECONDS = 180
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
PARSERS: tuple[dict[str, str], ...] = ({}, {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"})


def settings_of(device: Device) -> list[EngineSettings]:
    """All combinations of what changes the command line; the last one is served."""
    base = EngineSettings(
        str(tiny()), "tiny", device, "bfloat16", "merged", max_model_len=512, max_num_seqs=8
    )
    on_cuda = device == "cuda"
    return [
        replace(
            base,
            publication=publication,
            enforce_eager=eager,
            max_loras=4 if eager else 40,  # more than an engine keeps in the machine's memory by default
            block_size=block_size,
            sleep=sleep,
            gpu_memory_utilization=share,
            tensor_parallel_size=parallel,
            **parsers,
        )
        for eager, block_size, share, parallel, sleep, publication, parsers in product(
            (True, False),
            (None, 32),
            (None, 0.55) if on_cuda else (None,),
            (2, 1) if on_cuda else (1,),
            (False, True) if on_cuda else (False,),
            ("merged", "adapter") if on_cuda else ("adapter", "merged"),
            PARSERS if on_cuda else PARSERS[::-1],
        )
    ]


@dataclass(frozen=True)
class Front:
    """A running server and what vLLM made of each command line."""

    device: Device
    url: str
    settings: list[EngineSettings]
    outcomes: list[dict[str, Any]]
    misspelt: dict[str, dict[str, Any]]
    """By flag: the outcome of a command line in which this flag is misspelt."""
    forced_v1: dict[str, Any]
    exported: list[dict[str, Any]]
    """The outcomes of what `insitu export` prints."""

    def ask(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)


def misspelt(arguments: list[str]) -> dict[str, list[str]]:
    return {
        flag: [part + "x" if part == flag else part for part in arguments]
        for flag in arguments
        if flag.startswith("--")
    }


def whole(settings: list[EngineSettings]) -> list[bool]:
    """Tell which command lines are resolved to a configuration: all that differ little from first or last."""
    ends = [asdict(settings[0]), asdict(settings[-1])]
    chosen: list[bool] = []
    for each in map(asdict, settings):
        far = min(sum(each[name] != end[name] for name in each) for end in ends)
        chosen.append(far <= 1)
    return chosen


def exported() -> list[list[str]]:
    """Return the commands that `insitu export` prints for an adapter and for merged weights."""
    place = Path("/exports/my, model")
    return [
        adapter_command("run", place, str(tiny()), 48),
        merged_command("run", tiny()),
        merged_command("run", tiny(), "float32"),
    ]


def asked_of(settings: list[EngineSettings], port: int) -> list[dict[str, Any]]:
    arguments, environment = settings[-1].command(port)[3:], settings[-1].environment()
    lines: list[tuple[list[str], dict[str, str], bool]] = [(each[3:], {}, True) for each in exported()]
    lines += [(wrong, environment, False) for wrong in misspelt(arguments).values()]
    lines.append((arguments, environment | {RUNNER: "0"}, True))
    for each, is_whole in zip(settings, whole(settings), strict=True):
        lines.append((each.command(port)[3:], each.environment(), is_whole))
    return [{"arguments": line, "environment": env, "whole": is_whole} for line, env, is_whole in lines]


def start(device: Device, folder: Path) -> tuple[subprocess.Popen[str], Path, int]:
    port, result = free_port(), folder / f"{device}.json"
    with (folder / f"{device}.log").open("w") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.gates.vllm_front", device, str(port), str(result)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    assert child.stdin is not None
    json.dump(asked_of(settings_of(device), port), child.stdin)
    child.stdin.close()
    return child, result, port


def wait_front(device: Device, child: subprocess.Popen[str], result: Path, port: int) -> Front:
    deadline, url = time.monotonic() + START_SECONDS, f"http://127.0.0.1:{port}"
    while True:
        assert child.poll() is None, result.with_suffix(".log").read_text()[-3000:]
        assert time.monotonic() < deadline, "vLLM's front did not start"
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            break
        except OSError:
            time.sleep(0.2)
    settings, outcomes = settings_of(device), json.loads(result.read_text())
    printed, outcomes = outcomes[: len(exported())], outcomes[len(exported()) :]
    flags = misspelt(settings[-1].command(port)[3:])
    wrong = dict(zip(flags, outcomes, strict=False))
    return Front(device, url, settings, outcomes[len(flags) + 1 :], wrong, outcomes[len(flags)], printed)


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Front]]:
    folder, devices = tmp_path_factory.mktemp("vllm"), ("cuda", "cpu")
    children = {device: start(device, folder) for device in devices}
    try:
        yield {device: wait_front(device, *children[device]) for device in devices}
    finally:
        for child, _, _ in children.values():
            end_child(child, 10)


@pytest.fixture(params=["cuda", "cpu"])
def front(request: pytest.FixtureRequest, fronts: dict[str, Front]) -> Front:
    return fronts[request.param]


def test_every_argument_has_its_effect(front: Front) -> None:
    num_whole = 0
    for settings, came_out in zip(front.settings, front.outcomes, strict=True):
        assert came_out["error"] is None, f"{settings}: {came_out['error']}"
        if "v2" not in came_out:
            continue
        num_whole += 1
        on_cuda = front.device == "cuda"
        wanted = {
            "v2": on_cuda,
            "device": front.device,
            "dtype": f"torch.{settings.dtype}",
            "head_dtype": "torch.float32" if on_cuda else f"torch.{settings.dtype}",
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "chunked_prefill": on_cuda,
            "tensor_parallel_size": settings.tensor_parallel_size,
            "sleep": settings.sleep,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "tool_call_parser": settings.tool_call_parser,
            "reasoning_parser": settings.reasoning_parser or "",
            "served_name": [settings.served_name],
        }
        assert {name: came_out[name] for name in wanted} == wanted, settings
        assert came_out["where"][0] == "127.0.0.1"
        if on_cuda:
            assert came_out["eager"] == settings.enforce_eager
        if settings.block_size is not None:
            assert came_out["block_size"] == settings.block_size
        if settings.gpu_memory_utilization is not None:
            assert came_out["memory_share"] == settings.gpu_memory_utilization
        assert (came_out["lora"] is not None) == (settings.publication == "adapter")
        if came_out["lora"] is not None:
            assert came_out["lora"][:2] == [settings.max_lora_rank, settings.max_loras]
            assert "lm_head" not in came_out["lora"][2]
    assert front.forced_v1["error"] is None
    assert not front.forced_v1["v2"]
    assert num_whole > 5
    num = len(front.outcomes)
    print(f"gate vllm-arguments-{front.device}: {num} command lines parsed, {num_whole} resolved ok")


def test_the_commands_of_exports_resolve(front: Front) -> None:
    for command, came_out in zip(exported(), front.exported, strict=True):
        assert command[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
        assert came_out["error"] is None, f"{command}: {came_out['error']}"
        assert came_out["generation_config"] == "vllm"
    adapter, merged, in_float32 = front.exported
    assert adapter["lora"][0] == 64, "the next rank that vLLM takes"
    assert (merged["lora"], merged["served_name"]) == (None, ["run"])
    assert in_float32["dtype"] == "torch.float32"


def test_misspelt_flag_is_found(front: Front) -> None:
    assert len(front.misspelt) > 10
    accepted = [flag for flag, came_out in front.misspelt.items() if came_out["error"] is None]
    assert not accepted, "vLLM accepts these with an x at the end"


def engine_paths() -> set[str]:
    """Find the paths that insitu calls on an engine in the source of the modules that call one."""
    folders = [Path(inspect.getfile(module)).parent for module in (engines, protocols)]
    files = [Path(inspect.getfile(replica)), *(file for folder in folders for file in folder.glob("*.py"))]
    found: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value[:1] == "/":
                found.add(node.value.partition("?")[0])
    return found - {"/"}


async def use_client(front: Front, folder: Path) -> None:
    """Call every method of the supervisor's client."""
    settings = front.settings[-1]
    async with aiohttp.ClientSession() as http:
        engine = EngineClient(http, front.url)
        assert await engine.healthy(10)
        assert await engine.responds(10)
        await engine.warm_up(settings, 60)
        await engine.set_version("base")
        assert await engine.adapters() == {"tiny"}
        if settings.publication == "adapter":
            await engine.load_adapter("run@1", folder)
            assert await engine.adapters() == {"tiny", "run@1"}
            assert await engine.score("run@1", [[1, 2, 3]]) == [[-1.0, -1.0]]
            await engine.load_adapter("run@2", folder)
            await engine.unload_adapter("run@2")
        await engine.reload_weights(folder, "base")
        assert await engine.score("tiny", [[1, 2, 3], [4, 5]]) == [[-1.0, -1.0], [-1.0]]
        await engine.sleep()
        parts = ("weights", "kv_cache") if len(inspect.signature(engine.wake_up).parameters) else ()
        for part in parts:
            await engine.wake_up(part)  # pyright: ignore[reportCallIssue]
        await engine.wake_up()
        for tag in ("weights", "kv_cache"):
            async with http.post(f"{front.url}/wake_up?tags={tag}") as answer:
                assert (await answer.json())["tags"] == [tag]


NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": NOTHING}}]
SAMPLING: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 7,
    "stop": ["END"],
    "logit_bias": {"5": 1},
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "ignore_eos": True,
    "stop_token_ids": [3],
    "bad_words": ["no"],
    "allowed_token_ids": [11, 12, 13],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": NOTHING}}


def client_requests(model: str, *, has_parsers: bool) -> list[tuple[str, dict[str, Any]]]:
    """Return calls of every protocol that carry each field the gateway accepts."""
    messages = [{"role": "user", "content": "hi"}]
    chat: list[dict[str, Any]] = [
        {},
        {**SAMPLING, "max_tokens": 3, "n": 2},
        {"logprobs": True, "top_logprobs": 2, "max_completion_tokens": 3, "return_token_ids": True},
        {"response_format": SCHEMA, "reasoning_effort": "low", "chat_template_kwargs": {"x": 1}},
    ]
    if has_parsers:
        chat += [{"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False}]
        chat += [{"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}}]
        chat += [{"thinking_token_budget": 8}]
    made = [("/v1/chat/completions", {"messages": messages, **each}) for each in chat]
    made += [("/v1/completions", {"prompt": "hi", **each}) for each in ({}, SAMPLING, {"logprobs": 1})]
    made += [("/v1/completions", {"prompt": [1, 2, 3], "skip_special_tokens": False})]
    made += [("/v1/responses", {"input": "hi", "max_output_tokens": 16})]
    made += [("/v1/messages", {"messages": messages, "max_tokens": 8})]
    return [(path, {"model": model, **body}) for path, body in made]


async def use_gateway(gateway: Running, front: Front) -> int:
    """Send every request, whole and streamed; the gateway answers only what vLLM accepted."""
    await wait_up(gateway)
    settings = front.settings[-1]
    models, runs = ["tiny"], {}
    if settings.publication == "adapter":
        models.append("run@1")
        runs = {"run": {"latest": 1, "served": {"1": {"engine_model": "run@1", "version": "run@1"}}}}
    await gateway.put_table(version="base", runs=runs)
    num_sent = 0
    async with aiohttp.ClientSession(headers={"authorization": "Bearer default"}) as http:
        for model, stream in product(models, (False, True)):
            for path, body in client_requests(model, has_parsers=settings.tool_call_parser is not None):
                async with http.post(gateway.url + path, json=body | {"stream": stream}) as answer:
                    text = await answer.text()
                assert answer.status == 200, f"{path} {body}: {text}"
                assert '"error"' not in text.replace('"error":null', ""), f"{path} {body}: {text}"
                num_sent += 1
        async with http.get(f"{gateway.url}/engines/replica-0/metrics") as answer:
            assert (answer.status, "python_info" in await answer.text()) == (200, True)
    return num_sent


def test_every_request_is_one_that_vllm_knows(front: Front, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    asyncio.run(use_client(front, tmp_path))
    engine = VllmServer(front.url, "tiny", tiny(), os.getpid(), tmp_path / "log")
    for gateway in start_gateway(engine, tmp_path):
        num_sent = asyncio.run(use_gateway(gateway, front))
    seen = front.ask("/seen")
    assert seen["unknown"] == [], "vLLM ignores these fields"
    routes, hit = set(seen["routes"]), set(seen["hit"])
    assert engine_paths() <= routes, "paths that vLLM does not have"
    only = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    mounted = {"/metrics"}  # an application of its own, which `use_gateway` has asked
    assert engine_paths() - mounted - (set() if front.settings[-1].publication == "adapter" else only) <= hit
    calls = {name: (given, named) for name, given, named in seen["calls"]}
    methods = [named for name, _, named in seen["calls"] if name == "collective_rpc"]
    assert any("'method': 'reload_weights'" in named for named in methods)
    assert calls["sleep"][0].startswith("(1,")
    print(f"gate vllm-bodies-{front.device}: {num_sent} calls, {len(seen['bodies'])} bodies known to vLLM ok")


def test_workers_of_both_runners_know_the_calls(fronts: dict[str, Front]) -> None:
    """Sleep, wake-up and reload reach the workers by name; both model runners must take the arguments."""
    workers = fronts["cpu"].ask("/workers")
    for kind in ("v1 runner", "v2 runner"):
        assert "weights_path" in workers[kind]["reload_weights"], kind
    assert workers["cuda worker"]["sleep"] == ["self", "level"]
    assert workers["cuda worker"]["wake_up"] == ["self", "tags"]
    assert {"weights", "kv_cache"} <= set(workers["cuda worker"]["tags"])


def test_the_parsers_that_models_choose_are_known_to_vllm() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert {rule.parser for rule in TOOL_RULES} <= {*ToolParserManager.list_registered()}
    assert {rule.parser for rule in REASONING_RULES} <= {*ReasoningParserManager.list_registered()}
