"""vLLM without an engine core: its own parser, configuration, routes, request models and renderer.

Run as a program: it reads command lines from standard input, resolves each with vLLM's own code, writes what
came of it to a file, then serves the last one. On `cuda` it pretends that the machine has GPUs. The stand-in
for the engine core answers every generation with the same tokens.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import sys
import types
from argparse import Namespace
from collections.abc import AsyncIterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

ANSWER = [11, 12, 13]
"""The tokens of every answer."""


def pretend_cuda() -> None:
    """Make vLLM believe in eight GPUs of 80 GB; call it before vLLM is imported."""
    for missing in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
        sys.modules[missing] = types.ModuleType(missing)
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class PretendedGpus(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 * 2**30

        @classmethod
        def device_count(cls) -> int:
            return 8

        def is_cumem_allocator_available(self) -> bool:
            return True

    vllm.platforms._current_platform = PretendedGpus()
    import vllm.config.vllm

    vllm.config.vllm.HAS_TRITON = True


@cache
def parser() -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def parse(arguments: list[str]) -> Namespace:
    """Parse and check the arguments as the server does."""
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args

    args = parser().parse_args(arguments)
    validate_parsed_serve_args(args)
    return args


def resolve(arguments: list[str]) -> tuple[Namespace, Any]:
    """Return the parsed arguments and the engine's whole configuration."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    args = parse(arguments)
    # vLLM changes the parsed values, some of which are the parser's own defaults.
    return args, AsyncEngineArgs.from_cli_args(deepcopy(args)).create_engine_config()


def outcome(arguments: list[str], environment: dict[str, str], *, whole: bool) -> dict[str, Any]:
    """Return the error, or None and, of a whole configuration, the settings that came out."""
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    os.environ.update(environment)
    try:
        if not whole:
            parse(arguments)
            return {"error": None}
        args, config = resolve(arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - vLLM's own errors are the outcome
        return {"error": f"{type(error).__name__}: {error}"}
    model, lora, scheduler = config.model_config, config.lora_config, config.scheduler_config
    return {
        "error": None,
        "v2": config.use_v2_model_runner,
        "device": str(config.device_config.device),
        "dtype": str(model.dtype),
        "head_dtype": str(model.head_dtype),
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "chunked_prefill": scheduler.enable_chunked_prefill,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "sleep": model.enable_sleep_mode,
        "eager": model.enforce_eager,
        "logprobs_mode": model.logprobs_mode,
        "generation_config": model.generation_config,
        "block_size": config.cache_config.block_size,
        "memory_share": config.cache_config.gpu_memory_utilization,
        "lora": None
        if lora is None
        else [lora.max_lora_rank, lora.max_loras, sorted(lora.target_modules or [])],
        "tool_call_parser": args.tool_call_parser,
        "reasoning_parser": config.structured_outputs_config.reasoning_parser,
        "served_name": args.served_model_name,
        "where": [args.host, args.port],
    }


class StandinCore:
    """Takes the place of the engine core and the workers behind vLLM's `AsyncLLM`."""

    def __init__(self, config: Any) -> None:
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.input_processor import InputProcessor

        renderer = renderer_from_config(config)
        self._inputs = InputProcessor(config, renderer)
        self._generate = inspect.signature(AsyncLLM.generate)
        self.client = create_autospec(AsyncLLM, instance=True)
        self.client.vllm_config, self.client.model_config = config, config.model_config
        self.client.renderer, self.client.input_processor = renderer, self._inputs
        self.client.errored = False
        self.client.generate = self.generate
        self.client.collective_rpc.return_value = [[]]
        self.client.reset_prefix_cache.return_value = True
        self.client.wake_up.return_value = True
        self.client.get_supported_tasks.return_value = ("generate",)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        from vllm.logprobs import Logprob
        from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

        given = self._generate.bind(None, *args, **kwargs).arguments
        params, lora = given["sampling_params"], given.get("lora_request")
        request = self._inputs.process_inputs(
            given["request_id"], given["prompt"], params, ("generate",), lora_request=lora
        )
        prompt = request.prompt_token_ids
        scored = None
        if params.prompt_logprobs is not None:
            scored = [None, *[{token: Logprob(-1.0, 1, "x")} for token in prompt[1:]]]
        tokens = ANSWER[: params.max_tokens]
        logprobs = (
            [{token: Logprob(-0.5, 1, "x")} for token in tokens] if params.logprobs is not None else None
        )
        spans = [WeightVersionSpan(version="base", start=0, end=len(tokens))]
        output = CompletionOutput(
            0, "xyz", tokens, -1.5, logprobs, finish_reason="length", weight_versions=spans, lora_request=lora
        )
        yield RequestOutput(
            given["request_id"], None, prompt, scored, [output], True, lora_request=lora, num_cached_tokens=0
        )


def unknown_fields(body: Any, validated: Any) -> list[str]:
    """List the keys of a body that its request model has no field for, which vLLM would ignore."""
    known = getattr(type(validated), "model_fields", None)
    if known is not None:
        names = {*known, *(field.alias for field in known.values())}
    elif hasattr(validated, "__struct_fields__"):
        names = set(validated.__struct_fields__)
    else:
        return []
    found = [f"{type(validated).__name__}.{key}" for key in body if key not in names]
    for key in body.keys() & names:
        value = getattr(validated, key, None)
        if isinstance(body[key], dict):
            found += unknown_fields(body[key], value)
        elif isinstance(body[key], list) and isinstance(value, list):
            for sent, taken in zip(body[key], value, strict=False):
                found += unknown_fields(sent, taken) if isinstance(sent, dict) else []
    return found


def watch(app: Any, seen: dict[str, list[Any]]) -> None:
    """Note the fields that each route's request model does not know."""
    from fastapi.routing import APIRoute
    from pydantic import BaseModel

    def watched(route: APIRoute, real: Any) -> Any:
        async def call(**values: Any) -> Any:
            seen["hit"].append(route.path)
            raw = values.get("raw_request")
            for value in values.values():
                if isinstance(value, BaseModel):
                    body = await raw.json()
                    seen["bodies"].append([route.path, type(value).__name__])
                    seen["unknown"] += unknown_fields(body, value)
            return await real(**values)

        return call

    for route in app.routes:
        if isinstance(route, APIRoute) and asyncio.iscoroutinefunction(inspect.unwrap(route.dependant.call)):
            route.dependant.call = watched(route, route.dependant.call)


def workers() -> dict[str, Any]:
    """Return the arguments of the methods that requests reach by name, for both model runners."""
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    def taken(kind: type, method: str) -> list[str]:
        return list(inspect.signature(inspect.unwrap(getattr(kind, method))).parameters)

    source = inspect.getsource(gpu_worker)
    return {
        "v1 runner": {"reload_weights": taken(RunnerV1, "reload_weights")},
        "v2 runner": {"reload_weights": taken(RunnerV2, "reload_weights")},
        "cuda worker": {
            "sleep": taken(gpu_worker.Worker, "sleep"),
            "wake_up": taken(gpu_worker.Worker, "wake_up"),
            "tags": re.findall(r'tag="(\w+)"', source),
        },
    }


async def serve(arguments: list[str], port: int) -> None:
    """Serve vLLM's application; `/seen` lists what arrived, `/workers` what would be called."""
    import uvicorn
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    args, config = resolve(arguments)
    core = StandinCore(config)
    app = build_app(args, ("generate",), config.model_config)
    routes = [route.path for route in app.routes]
    await init_app_state(core.client, app.state, args, ("generate",))
    seen: dict[str, list[Any]] = {"bodies": [], "unknown": [], "hit": [], "routes": routes}
    watch(app, seen)

    @app.get("/seen")
    async def _() -> dict[str, Any]:
        calls = [[name, repr(given), repr(named)] for name, given, named in core.client.method_calls]
        return seen | {"calls": calls}

    app.get("/workers")(workers)

    await uvicorn.Server(uvicorn.Config(app, "127.0.0.1", port, log_level="warning")).serve()


def main(device: str, port: str, result: str) -> None:
    """Resolve the command lines of standard input and write the outcomes; serve the last one."""
    asked = json.load(sys.stdin)
    os.environ.update(asked[-1]["environment"])
    if device == "cuda":
        pretend_cuda()
    found = [outcome(each["arguments"], each["environment"], whole=each["whole"]) for each in asked]
    Path(f"{result}.part").write_text(json.dumps(found))
    Path(f"{result}.part").rename(result)
    asyncio.run(serve(asked[-1]["arguments"], int(port)))


if __name__ == "__main__":
    main(*sys.argv[1:])
