"""A vLLM replica: the Ray actor that holds its devices, and the HTTP client that controls it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Literal, Protocol, TypeVar

import aiohttp

from insitu.access import engine_door
from insitu.backend.fleet.background import to_background, to_foreground
from insitu.backend.fleet.node import Files, Node
from insitu.backend.in_engine import adapters as adapter_check
from insitu.backend.plan.compute import Threads
from insitu.backend.plan.engine import EngineSettings
from insitu.backend.plan.settings import Deadlines
from insitu.errors import CannotHonour, ChildFailed, DeadlineExceeded, UpstreamError
from insitu.system.logs import vllm_logging_config
from insitu.system.paths import cache_dir
from insitu.system.processes import end_child, free_port, spawn, tail
from insitu.wire.engine import (
    AdapterDirectory,
    Completion,
    EngineModels,
    EngineState,
    FindLeftOut,
    LeftOut,
    LoadAdapter,
    NewVersion,
    ReloadWeights,
    ScoredPrompts,
    UnloadAdapter,
    WeightsPath,
)
from insitu.wire.message import Malformed, Message, encode, read

Received = TypeVar("Received", bound=Message)
Memory = Literal["weights", "kv_cache"]
"""The parts of an engine's memory that wake up one by one."""

_OCCUPYING = frozenset({"/collective_rpc", "/v1/load_lora_adapter", "/sleep", "/wake_up"})
_SHOWN_TENSORS = 3
_GRACE_SECONDS = 3.0
_BACKGROUND_SECONDS = 120.0
"""On a machine that has no time left, a start in the background would not end."""
_DEADLINES = Deadlines()
_WARM_UP_PROMPT = 48
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Server:
    """A vLLM server process."""

    url: str
    pid: int
    devices: str
    """The devices it may use, as in CUDA_VISIBLE_DEVICES."""
    is_home: bool = True
    """False: it runs on another node than the supervisor."""


class ReplicaActor:
    """Runs inside a Ray actor and owns the vLLM server process on the devices that Ray assigned.

    No method waits for the server to become ready; the supervisor does. The server is started from the
    actor's main thread: the kernel kills it when that thread ends.
    """

    def __init__(
        self,
        settings: EngineSettings,
        log_path: str,
        env: dict[str, str],
        key: str,
        threads: Threads | None,
        home: str | None = None,
    ) -> None:
        """`home`: the supervisor's node. On another one, log and temporary files are in a folder there."""
        self._node = Node(home, Path(log_path))
        self._port = free_port(self._node.address)
        self._log = self._node.log
        if not self._node.is_home:
            env, threads = engine_environment(self._node.scratch), None  # the supervisor's cores are others
        environment = {**settings.environment(), **env, **(threads.environment() if threads else {})}
        environment[engine_door.VARIABLE] = key
        if threads is not None and threads.cpus is not None:
            # The server inherits this actor's affinity; the actor itself computes nothing.
            os.sched_setaffinity(0, threads.cpus)
        command = [*settings.command(self._port, self._node.address), *engine_door.VLLM_ARGUMENTS]
        if settings.publication == "adapter":
            command += adapter_check.VLLM_ARGUMENTS
        self._server = spawn(command, self._log, environment)

    def describe(self) -> Server:
        """Return where the server is."""
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        url = f"http://{self._node.address}:{self._port}"
        return Server(url, self._server.pid, devices, self._node.is_home)

    def keep(self, digest: str, files: Files) -> str:
        """Write a directory that the supervisor sent; return its path on this node."""
        return self._node.keep(digest, files)

    def discard(self, digest: str) -> None:
        """Remove a directory that was sent."""
        self._node.discard(digest)

    def to_background(self) -> None:
        """Let the server start on the time that others leave it, for a while."""
        to_background(self._server.pid)
        self._foreground = Timer(_BACKGROUND_SECONDS, to_foreground, [self._server.pid])
        self._foreground.daemon = True
        self._foreground.start()

    def to_foreground(self) -> None:
        """Give the server its usual priority."""
        self._foreground.cancel()
        to_foreground(self._server.pid)

    def exit_report(self) -> str | None:
        """Return None while the server runs, then its exit code and last log lines."""
        code = self._server.poll()
        return None if code is None else f"exit code {code}; last lines of {self._log}:\n{tail(self._log)}"

    def stop(self) -> None:
        """Stop the server and everything it started."""
        end_child(self._server, _GRACE_SECONDS)
        self._node.close()


def engine_environment(scratch: Path) -> dict[str, str]:
    """Return an environment with temporary files in the scratch directory and logs as JSON lines."""
    config = scratch / "vllm-logging.json"
    config.write_text(json.dumps(vllm_logging_config()))
    return {
        "TMPDIR": str(scratch),
        "VLLM_RPC_BASE_PATH": str(scratch),
        # Compiled kernels are kept across processes: without them the first call takes a minute.
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir() / "torchinductor"),
        "VLLM_LOGGING_CONFIG_PATH": str(config),
    }


class Delivery(Protocol):
    """Brings adapters to the node of an engine, and removes them there."""

    async def bring(self, name: str, directory: Path) -> Path:
        """Return the directory's path there."""
        ...

    async def remove(self, name: str) -> None:
        """Let go of what was brought under a name."""
        ...


class EngineClient:
    """Controls one vLLM server over its own HTTP API."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        deadlines: Deadlines = _DEADLINES,
        key: str = "",
        delivery: Delivery | None = None,
    ) -> None:
        """`delivery`: None if the server is on this node."""
        self.url = url
        self.occupied = 0
        """Requests under way that keep the engine from answering anything else, each with its deadline."""
        self._weights: str | None = None
        self._adapters: list[str] = []
        self._http = http
        self._deadlines = deadlines
        self._headers = engine_door.headers(key)
        self._delivery = delivery

    @property
    def versions(self) -> list[str]:
        """The version of its full weights, unless they are being replaced, and its adapters' names."""
        return [*([] if self._weights is None else [self._weights]), *self._adapters]

    async def healthy(self, deadline_seconds: float = 2.0) -> bool:
        """Return True if the server passes its health check in time."""
        return await self._status("/health", deadline_seconds) == 200

    async def responds(self, deadline_seconds: float) -> bool:
        """Return True if the engine's loop answers in time, whatever it answers.

        Unlike the health check, the question goes through to the process that computes.
        """
        return await self._status("/is_sleeping", deadline_seconds) is not None

    async def _status(self, path: str, deadline_seconds: float) -> int | None:
        """Return the status that the server answers with; None if it does not answer in time."""
        try:
            timeout = aiohttp.ClientTimeout(total=deadline_seconds)
            async with self._http.get(self.url + path, headers=self._headers, timeout=timeout) as answer:
                return answer.status
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def warm_up(self, settings: EngineSettings, deadline_seconds: float) -> None:
        """Compile the kernels of sampling and scoring, then run a batch as large as the largest real one.

        The batch touches the memory and prepares the kernels of that shape, so that the first real batch is
        as fast as the next.
        """
        kernels = [[1, 2, 3], [1, 2]]
        await self._complete(settings, kernels, deadline_seconds, prompt_logprobs=0)
        length = max(1, min(_WARM_UP_PROMPT, settings.max_model_len - _WARM_UP_TOKENS))
        # Each prompt starts with a different token, so that none hits another's cache.
        batch = [[1 + index, *[2] * (length - 1)] for index in range(settings.max_num_seqs)]
        await self._complete(settings, batch, deadline_seconds)

    async def _complete(
        self,
        settings: EngineSettings,
        prompts: list[list[int]],
        deadline_seconds: float,
        prompt_logprobs: int | None = None,
    ) -> None:
        body = Completion(
            model=settings.served_name,
            prompt=prompts,
            max_tokens=min(_WARM_UP_TOKENS, settings.max_model_len - 3),
            logprobs=1,
            ignore_eos=True,
            prompt_logprobs=prompt_logprobs,
        )
        await self._post("/v1/completions", body, deadline_seconds)

    async def load_adapter(self, name: str, path: Path) -> None:
        """Serve a LoRA directory under a name that was never used before; all of it, or nothing."""
        if self._delivery is not None:
            path = await self._delivery.bring(name, path)
        tensors = await self._tensors_left_out(path)
        if tensors:
            more = ", …" if len(tensors) > _SHOWN_TENSORS else ""
            raise CannotHonour(
                f"the engine would serve {name} without {len(tensors)} of its tensors: "
                f"{', '.join(tensors[:_SHOWN_TENSORS])}{more}",
                hint="register with `lora.target_modules` of layers that vLLM adapts, or serve with "
                "--publication merged",
            )
        await self._post("/v1/load_lora_adapter", LoadAdapter(name, str(path)), self._deadlines.publish)
        self._adapters.append(name)

    async def _tensors_left_out(self, path: Path) -> list[str]:
        """Return the tensors of an adapter that a worker does not compute with."""
        asked = FindLeftOut(AdapterDirectory(str(path)))
        content = await self._post("/collective_rpc", asked, self._deadlines.publish)
        return sorted(set().union(*self._parsed(LeftOut, "/collective_rpc", content).results))

    async def unload_adapter(self, name: str) -> None:
        """Stop serving a LoRA; vLLM answers for a name that it does not have with an error."""
        await self._post("/v1/unload_lora_adapter", UnloadAdapter(name), self._deadlines.handover)
        self._adapters = [loaded for loaded in self._adapters if loaded != name]
        if self._delivery is not None:
            await self._delivery.remove(name)

    async def adapters(self) -> set[str]:
        """Return the names the server answers to, including the base model's."""
        content = await self._request("GET", "/v1/models", None, 10)
        return {entry.id for entry in self._parsed(EngineModels, "/v1/models", content).data}

    async def reload_weights(self, directory: Path, version: str) -> None:
        """Replace the full weights in place and set their version; no call may be in flight."""
        self._weights = None
        await self._post(
            "/collective_rpc", ReloadWeights(WeightsPath(str(directory))), self._deadlines.publish
        )
        await self._post("/reset_prefix_cache", None, self._deadlines.handover)
        await self.set_version(version)

    async def set_version(self, version: str) -> None:
        """Set the version that the engine reports for its full weights."""
        await self._post("/update_weight_version", NewVersion(version), self._deadlines.handover)
        self._weights = version

    async def sleep(self) -> None:
        """Free the devices' memory (CUDA only); calls that are still under way are aborted."""
        await self._post("/sleep?level=1", None, self._deadlines.handover)

    async def wake_up(self, part: Memory | None = None) -> None:
        """Take back one part of the memory, or all of it; the engine answers calls when it has both."""
        path = "/wake_up" if part is None else f"/wake_up?tags={part}"
        state = self._parsed(EngineState, path, await self._post(path, None, self._deadlines.handover))
        if part != "weights" and state.status != "awake":
            raise UpstreamError(f"the engine at {self.url} is still {state.status} after {path}")

    async def score(self, model: str, sequences: list[list[int]]) -> list[list[float]]:
        """Return each token's log-probability from the second on, under the served weights.

        All sequences go in one request, so that the same ones are always computed in the same batch.
        """
        body = Completion(model=model, prompt=sequences, max_tokens=1, temperature=1.0, prompt_logprobs=0)
        content = await self._post("/v1/completions", body, self._deadlines.score)
        answer = self._parsed(ScoredPrompts, "/v1/completions", content)
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        try:
            return [choice.scores_of(ids) for choice, ids in zip(choices, sequences, strict=True)]
        except Malformed as error:
            raise UpstreamError(f"the engine at {self.url} did not score our tokens: {error}") from error

    def _parsed(self, kind: type[Received], path: str, content: bytes) -> Received:
        try:
            return read(kind, content)
        except Malformed as error:
            text = f"the engine at {self.url} answered {path} with {content[:200]!r}: {error}"
            raise UpstreamError(text) from error

    async def _post(self, path: str, body: Message | None, deadline_seconds: float) -> bytes:
        return await self._request("POST", path, body, deadline_seconds)

    async def _request(self, method: str, path: str, body: Message | None, deadline_seconds: float) -> bytes:
        timeout = aiohttp.ClientTimeout(total=deadline_seconds)
        data = None if body is None else encode(body, without=Completion.OPTIONAL)
        headers = self._headers | ({} if data is None else {"Content-Type": "application/json"})
        occupies = path.partition("?")[0] in _OCCUPYING
        self.occupied += occupies
        try:
            async with self._http.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as answer:
                content = await answer.read()
                if answer.status != 200:
                    text = content[:500].decode("utf-8", "replace")
                    raise UpstreamError(
                        f"the engine at {self.url} answered {answer.status} to {path}: {text}"
                    )
                return content
        except TimeoutError as error:
            message = f"the engine at {self.url} did not answer {path} in {deadline_seconds:g} s"
            raise DeadlineExceeded(message) from error
        except aiohttp.ClientError as error:
            raise UpstreamError(f"the engine at {self.url} broke off during {path}: {error!r}") from error
        finally:
            self.occupied -= occupies


async def wait_healthy(
    engine: EngineClient, exit_report: Callable[[], Awaitable[str | None]], deadline_seconds: float
) -> None:
    """Wait until a starting server is healthy; raise ChildFailed with its report if it exits first."""
    waited = 0.0
    while waited < deadline_seconds:
        if await engine.healthy():
            return
        report = await exit_report()
        if report is not None:
            raise ChildFailed(f"vLLM ended while starting: {report}")
        await asyncio.sleep(0.5)
        waited += 0.5
    raise DeadlineExceeded(
        f"vLLM at {engine.url} was not healthy after {deadline_seconds:.0f} s",
        hint="see the replica's log in the state directory; --engine-start-seconds sets the deadline",
    )
