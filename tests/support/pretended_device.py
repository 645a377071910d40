"""A GPU that only counts bytes, and stand-ins for the engine and the trainer that charge theirs to it.

What is real around them: the device lease, model host, publishers, step runner, registrar, traffic and
ledger; the client of the engine, over HTTP; and the trainer's arithmetic, a `TrainerRank` on a tiny model.
The stand-in engine computes its scores with the files that were published to it.

Every operation of a stand-in passes two points, `name` before it takes effect and `name:done` after. A
fault can be injected at any of them: the operation fails there, or never goes on.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from aiohttp import web

from insitu.backend.fleet.cluster import ActorDied
from insitu.backend.fleet.rank_info import limits_of
from insitu.backend.fleet.replica import EngineClient
from insitu.backend.fleet.replicas import Replica, ReplicaSet
from insitu.backend.fleet.scorer import Scorer
from insitu.backend.fleet.trainer import TrainerGroup
from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.backend.plan.engine import EngineSettings
from insitu.errors import ChildFailed, InsituError
from insitu.training import passes
from insitu.training.batching import score_batch
from insitu.training.learner import load_adapter
from insitu.training.model.loading import load_policy
from insitu.training.model.lora import AdapterPool
from insitu.training.packing import pack_step
from insitu.types import LoraSettings
from insitu.wire.engine import FindLeftOut
from tests.support.standin_engine import Behaviour, StandinEngine

Kind = Literal["out of memory", "refused", "dies", "hangs"]
Faults = dict[str, Kind]
LORA = LoraSettings(rank=4, alpha=8, seed=3)
HANG_SECONDS = 0.3
"""The deadline of an operation that is going to hang; the others are computed, however long that takes."""
_PIDS = itertools.count(2**24)  # beyond every real process
_CHECK = "engine.check"
_ENGINE_POINTS = {
    "/sleep": "engine.sleep",
    "/wake_up": "engine.wake_up",
    "/v1/load_lora_adapter": "engine.load",
    "/v1/unload_lora_adapter": "engine.unload",
    "/collective_rpc": "engine.reload",
    "/reset_prefix_cache": "engine.reset_cache",
    "/update_weight_version": "engine.version",
    "/v1/completions": "engine.score",
}


@dataclass(frozen=True)
class Sizes:
    """What a model takes on a device, in GiB."""

    total: float
    share: float
    """vLLM's share of the device, taken while it is awake."""
    weights: float
    context: float
    """What a process keeps while it sleeps or is off the device: its CUDA context and small buffers."""
    resident: float
    """The trainer's base, adapters and moments."""
    activations: float


SMALL = Sizes(total=24, share=0.9, weights=6.2, context=0.8, resident=6.8, activations=12)
"""3B on 24 GB: neither the engine awake nor the trainer at work leaves room for the other."""
LARGE = Sizes(total=80, share=0.92, weights=15.2, context=1.0, resident=16.4, activations=50)
"""7B on 80 GB."""


class Injected(Exception):
    """A fault that a test asked for."""


class Refused(Exception):
    """An engine answers, but does not do what it was asked."""


@dataclass
class PretendedDevice:
    """Counts what each process holds. Taking more than there is fails, and is remembered."""

    sizes: Sizes
    held: dict[str, float] = field(default_factory=dict)
    peak: float = 0.0
    exceeded: list[str] = field(default_factory=list)
    visited: list[str] = field(default_factory=list)
    answered: list[tuple[str, Path | None]] = field(default_factory=list)
    """The version that an engine said for each generation, and the full weights that it had."""
    faults: Faults = field(default_factory=dict)
    """Where to fail, once each: a point's name with its number of visits before, `engine.sleep#0`."""

    def hold(self, process: str, gib: float) -> None:
        """Let a process hold this much from now on, instead of what it held before."""
        others = sum(self.held.values()) - self.held.get(process, 0.0)
        if others + gib > self.sizes.total:
            self.exceeded.append(f"{process} asks for {gib:.1f} GiB beside {self.held}")
            raise Injected(f"CUDA out of memory: {self.exceeded[-1]}")
        self.held[process] = gib
        self.peak = max(self.peak, others + gib)

    def free(self, process: str) -> None:
        self.held.pop(process, None)

    def at(self, point: str) -> Kind | None:
        """Note that an operation passes a point; return the fault to act out, or None."""
        numbered = self._numbered(point)
        self.visited.append(numbered)
        return self.faults.pop(numbered, None)

    def hangs_next(self, operation: str) -> bool:
        """Tell whether an operation is going to hang, before its effect, amid it or after."""
        points = [self._numbered(operation), self._numbered(operation + ":done")]
        if operation == "trainer.train_step":
            points += [point for point in self.faults if point.startswith("trainer.micro_batch")]
        return any(self.faults.get(point) == "hangs" for point in points)

    def _numbered(self, point: str) -> str:
        return f"{point}#{sum(seen.startswith(point + '#') for seen in self.visited)}"

    @contextmanager
    def watched(self, faults: Faults) -> Iterator[list[str]]:
        """Count points anew inside this block, and fail at some of them; yield the points passed."""
        self.visited, self.faults = [], dict(faults)
        yield self.visited
        assert not self.faults, f"{self.faults} were never reached; passed were {self.visited}"


class StandinScores:
    """Log-probabilities of a published version, computed from its files."""

    def __init__(self, model: Path) -> None:
        self._policy = load_policy(str(model), torch.device("cpu"))
        self._pool = AdapterPool(self._policy.model)
        self._adapter = self._pool.add(LORA)
        self._scorer = Scorer(self._policy, self._pool, torch.device("cpu"), torch.float32)

    @torch.no_grad()
    def of(self, adapter: Path | None, merged: Path | None, rows: list[list[int]]) -> list[list[float]]:
        if merged is not None:
            logprob_t, _ = load_policy(str(merged), torch.device("cpu"))(score_batch(rows))
            return [part.tolist() for part in logprob_t.split([len(ids) - 1 for ids in rows])]
        if adapter is not None:
            load_adapter(self._adapter, adapter.parent)
        score = self._scorer.score_base if adapter is None else self._scorer.score
        logprob_t, _ = score(score_batch(rows))
        return [part.tolist() for part in logprob_t.split([len(ids) - 1 for ids in rows])]


class StandinVllm(StandinEngine):
    """A stand-in for a vLLM process on a GPU: sleeps, wakes up in parts, loads what is published."""

    def __init__(self, device: PretendedDevice, settings: EngineSettings, scores: StandinScores) -> None:
        super().__init__(Behaviour(models=[settings.served_name]))
        self.pid = next(_PIDS)
        self.alive = False
        self._device = device
        self._process = f"engine {self.pid}"
        self._scores = scores
        self._paths: dict[str, Path] = {}
        self._merged: Path | None = None
        self._asleep: set[str] = set()
        self._awake = asyncio.Event()
        self._awake.set()
        self.answering = asyncio.Event()
        """Cleared, it is alive and answers neither calls nor questions."""
        self.answering.set()
        self._ending: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Take the device's share, as vLLM does after it has checked that so much is free."""
        if (fault := self._device.at("engine.start")) is not None:
            raise ChildFailed(f"vLLM ended while starting: {fault}")
        try:
            self._hold(set())
        except Injected as error:
            raise ChildFailed(f"vLLM ended while starting: {error}") from error
        await super().start()
        self.alive = True

    async def stop(self) -> None:
        """End as a killed process does; the driver takes its memory back."""
        self.alive = False
        self._device.free(self._process)
        await super().stop()

    def _hold(self, asleep: set[str]) -> None:
        sizes = self._device.sizes
        cache = sizes.share * sizes.total - sizes.weights - sizes.context
        parts = {"weights": sizes.weights, "kv_cache": cache}
        gib = sizes.context + sum(size for part, size in parts.items() if part not in asleep)
        self._device.hold(self._process, gib)
        self._asleep = asleep
        if asleep:
            self._awake.clear()
        else:
            self._awake.set()

    def add_routes(self, app: web.Application) -> None:
        acts = {
            "/sleep": self._sleep,
            "/wake_up": self._wake_up,
            "/v1/load_lora_adapter": self._load_adapter,
            "/v1/unload_lora_adapter": self._unload_adapter,
            "/collective_rpc": self._reload,
            "/reset_prefix_cache": self._nothing,
            "/update_weight_version": self._version,
            "/v1/completions": self._score,
        }
        app.router.add_get("/is_sleeping", self._is_sleeping)
        for path, act in acts.items():
            app.router.add_post(path, self._operation(_ENGINE_POINTS[path], act))

    def _operation(self, name: str, act: Any) -> Any:
        async def handle(request: web.Request) -> web.Response:
            body = await request.json() if request.can_read_body else {}
            part = request.query.get("tags")
            point = name if part is None else f"{name}.{part}"
            checks = body.get("method") == "tensors_left_out"
            point = _CHECK if checks else point
            try:
                await self._pass(point)
                answer = {"results": [[]]} if checks else act(part, body)
                await self._pass(f"{point}:done")
            except Refused:
                return web.json_response({"status": "sleeping", "tags": [part]})
            except Injected as error:
                if not self.alive:
                    self._ending = asyncio.ensure_future(self.stop())
                    assert request.transport is not None
                    request.transport.abort()
                return web.json_response({"error": str(error)}, status=500)
            return web.json_response(answer)

        return handle

    async def _pass(self, point: str) -> None:
        fault = self._device.at(point)
        if fault == "hangs":
            await asyncio.Event().wait()
        if fault == "refused":
            raise Refused(fault)
        if fault == "dies":
            self.alive = False
        if fault is not None:
            raise Injected(fault)

    async def _is_sleeping(self, _request: web.Request) -> web.Response:
        await self.answering.wait()
        return web.json_response({"is_sleeping": bool(self._asleep)})

    def _sleep(self, _part: str | None, _body: Any) -> dict[str, Any]:
        self._hold({"weights", "kv_cache"})
        return {"status": "sleeping"}

    def _wake_up(self, part: str | None, _body: Any) -> dict[str, Any]:
        self._hold(self._asleep - ({part} if part else self._asleep))
        return {"status": "sleeping" if self._asleep else "awake", "tags": [part]}

    def _load_adapter(self, _part: str | None, body: Any) -> dict[str, Any]:
        assert "weights" not in self._asleep, "an adapter was loaded into memory that is not there"
        self._paths[body["lora_name"]] = Path(body["lora_path"])
        self.behaviour.adapters.append(body["lora_name"])
        return {}

    def _unload_adapter(self, _part: str | None, body: Any) -> dict[str, Any]:
        assert not self._asleep, "an adapter was unloaded from memory that is not there"
        del self._paths[body["lora_name"]]
        self.behaviour.adapters.remove(body["lora_name"])
        return {}

    def _reload(self, _part: str | None, body: Any) -> dict[str, Any]:
        assert "weights" not in self._asleep, "weights were loaded into memory that is not there"
        self._merged = Path(body["kwargs"]["weights_path"])
        return {}

    def _nothing(self, _part: str | None, _body: Any) -> dict[str, Any]:
        return {}

    def _version(self, _part: str | None, body: Any) -> dict[str, Any]:
        self.behaviour.weight_version = body["new_version"]
        return {}

    def _score(self, _part: str | None, body: Any) -> dict[str, Any]:
        assert not self._asleep, "a sleeping engine was asked for scores"
        rows = body["prompt"]
        scored = self._scores.of(self._paths.get(body["model"]), self._merged, rows)
        choices = []
        for index, (ids, logprobs) in enumerate(zip(rows, scored, strict=True)):
            entries = [{str(t): {"logprob": x}} for t, x in zip(ids[1:], logprobs, strict=True)]
            choices.append({"index": index, "prompt_logprobs": [None, *entries]})
        return {"choices": choices}

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        await self._awake.wait()  # vLLM's scheduler is paused: calls queue up
        await self.answering.wait()
        self._device.answered.append((self.behaviour.weight_version, self._merged))
        return await super()._generate(request)


class HastyEngineClient(EngineClient):
    """The real client, but it does not wait long for an operation that is going to hang."""

    def __init__(self, device: PretendedDevice, *args: Any) -> None:
        super().__init__(*args)
        self._device = device

    async def _request(self, method: str, path: str, body: Any, deadline_seconds: float) -> bytes:
        bare, _, tag = path.partition("?tags=")
        point = _ENGINE_POINTS.get(bare.partition("?")[0], bare) + (f".{tag}" if tag else "")
        point = _CHECK if isinstance(body, FindLeftOut) else point
        seconds = HANG_SECONDS if self._device.hangs_next(point) else deadline_seconds
        return await super()._request(method, path, body, seconds)


class StandinReplicaActor:
    """A stand-in for the Ray actor of a replica, in this process."""

    def __init__(self, server: StandinVllm) -> None:
        self.server = server

    def call(self, method: str) -> Awaitable[str | None]:
        return asyncio.ensure_future(self._do(method))

    async def _do(self, method: str) -> str | None:
        if method == "stop":
            await self.server.stop()
        return None if self.server.alive else "killed"

    def kill(self) -> None:
        """Nothing is left to kill after `stop`."""


class StandinReplicaSet(ReplicaSet):
    """Real in everything but the start of one replica."""

    def __init__(self, device: PretendedDevice, scores: StandinScores, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._device = device
        self._scores = scores

    async def _reserve(self, settings: EngineSettings) -> None:
        """Reserve nothing: Ray has no GPU here."""

    async def _start_one(self, index: int, settings: EngineSettings, in_background: bool = False) -> Replica:
        server = StandinVllm(self._device, settings, self._scores)
        await server.start()
        actor: Any = StandinReplicaActor(server)
        engine = HastyEngineClient(self._device, self._http, server.url, self._deadlines)
        return Replica(f"replica-{index}", actor, engine, server.pid, "0", 0.0)


class StandinTrainerGroup(TrainerGroup):
    """A real rank in this process instead of a Ray actor; its bytes are the pretended device's."""

    def __init__(self, device: PretendedDevice, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._device = device
        self._rank: TrainerRank | None = None
        self._process = ""

    async def start(self, *_: Any, **__: Any) -> None:
        pid = next(_PIDS)
        self._process = f"trainer {pid}"
        self._actors = [self]  # type: ignore[list-item]
        await self._wait("start", "trainer_start", lambda: self._load(pid))

    def _load(self, pid: int) -> None:
        self._device.hold(self._process, self._device.sizes.context + self._device.sizes.resident)
        four_bit = self._settings.four_bit_base
        self._rank = TrainerRank(
            0, 1, "127.0.0.1", 0, self._base_model, "float32", 1, "cpu", 64, four_bit=four_bit
        )
        self.ranks = [{**self._rank.info(), "pid": pid}]
        self.limits = limits_of(self.ranks[0])
        self.linear_layers = self.ranks[0]["linear_layers"]

    async def stop(self) -> None:
        self._device.free(self._process)
        self._rank, self._actors, self.opened, self.ranks = None, [], {}, []

    async def train_step(self, run: str, *args: Any) -> dict[str, float]:
        sequences, settings, reference = args
        packing = pack_step(sequences, settings, self.limits, 1)
        step = self.opened.pop(run)
        batch = packing.rank_batch(0)
        (metrics,) = await self._all("train_step", run, batch, settings, reference, deadline="step")
        self.opened[run] = step + 1
        return metrics

    async def _each(self, method: str, arguments: Sequence[tuple[Any, ...]], deadline: str) -> list[Any]:
        self._check_running(method)
        (args,) = arguments
        return await self._wait(method, deadline, lambda: self._charged(method, args))

    async def _wait(self, method: str, deadline: str, act: Any) -> list[Any]:
        """Wait for the one rank as for real ones; one that is going to hang has little time."""
        patient = self._settings
        if self._device.hangs_next(f"trainer.{method}"):
            hasty = replace(patient.deadlines, **{deadline: HANG_SECONDS})
            self._settings = replace(patient, deadlines=hasty)
        try:
            return await self._together([asyncio.ensure_future(self._do(method, act))], deadline, method)
        finally:
            self._settings = patient

    async def _do(self, method: str, act: Any) -> Any:
        await asyncio.sleep(0)
        try:
            self._pass(f"trainer.{method}")
            result = act()
            self._pass(f"trainer.{method}:done")
        except Injected as error:
            if error.args == ("hangs",):
                await asyncio.Event().wait()
            if not self._process_lives:
                await self.stop()
                raise ActorDied(f"the trainer's {method} failed: a Ray actor died") from error
            raise ChildFailed(f"the trainer's {method} failed: {error}") from error
        except InsituError:
            raise
        return result

    _process_lives = True

    def _pass(self, point: str) -> None:
        fault = self._device.at(point)
        self._process_lives = fault != "dies"
        if fault is not None:
            raise Injected(fault)

    def _charged(self, method: str, args: tuple[Any, ...]) -> Any:
        """Run a method of the rank and charge what it would take on a device."""
        sizes = self._device.sizes
        resting = sizes.context + sizes.resident
        if method in ("train_step", "score", "export_merged", "open_run", "start_run"):
            assert self._device.held[self._process] >= resting, (
                f"{method} while the trainer is off the device"
            )
            self._device.hold(self._process, resting + sizes.activations)
        try:
            with self._failing_in_the_middle() if method == "train_step" else contextmanager(_plain)():
                return getattr(self._rank, method)(*args)
        finally:
            off = method == "off_device"
            kept = sizes.context if off else resting if method == "on_device" else None
            if kept is not None or self._device.held.get(self._process, 0) > resting:
                self._device.hold(self._process, resting if kept is None else kept)

    @contextmanager
    def _failing_in_the_middle(self) -> Iterator[None]:
        """Pass a point before every micro-batch: a fault there leaves gradients of the ones before."""
        real = passes.forward_backward

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._pass("trainer.micro_batch")
            return real(*args, **kwargs)

        passes.forward_backward = watched
        try:
            yield
        finally:
            passes.forward_backward = real


def _plain() -> Iterator[None]:
    yield
