"""The supervisor's view of the trainer: all ranks together, as Ray actors.

A step is a transaction. While it is under way the run counts as closed, so after any failure it is opened
again from its last checkpoint, and nothing of the failed step (gradients, moments, weights) is left. Ranks
live and die together: when one fails while another waits for it, or a deadline passes, all of them are
killed, and the next use of the trainer starts them again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from insitu.backend.fleet.cluster import Actor, ActorDied, check_room, ended, gather
from insitu.backend.fleet.placement import Reservation, seat_ranks
from insitu.backend.fleet.rank_info import LoadedRank, RankArguments, limits_of
from insitu.backend.fleet.token_figures import TokenFigures, token_figures
from insitu.backend.plan.settings import ServeSettings, option_of
from insitu.errors import DeadlineExceeded, InsituError
from insitu.system.logs import log_to
from insitu.system.processes import free_port
from insitu.training.packing import Limits, Packing, RankBatch, pack_step
from insitu.types import LoraSettings, StepSettings, TrainingSequence

if TYPE_CHECKING:
    from insitu.backend.fleet.trainer_rank import TrainerRank

_GRACE_SECONDS = 3.0
"""After one rank's failure, the others have this long to fail alike; one that has not waits for the dead."""
log = logging.getLogger(__name__)


class _RankActor:
    """Runs inside a Ray actor; torch is imported there, never in the supervisor."""

    def __init__(self, log_path: str, devices: str | None) -> None:
        log_to(Path(log_path))
        if devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices
        self._rank: TrainerRank | None = None

    def load(self, arguments: RankArguments) -> LoadedRank:
        if not arguments.get("four_bit"):
            # PEFT imports it wherever it is installed; that takes seconds, and nothing else uses it.
            sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type]
        from insitu.backend.fleet.trainer_rank import TrainerRank

        self._rank = TrainerRank(**arguments)
        return {**self._rank.info(), "pid": os.getpid()}

    def do(self, method: str, *args: object) -> object:
        return getattr(self._rank, method)(*args)


class TrainerGroup:
    """Starts and stops all ranks, and calls them together."""

    def __init__(self, settings: ServeSettings, base_model: str, actor: type = _RankActor) -> None:
        """`actor` runs each rank; another one is for fault injection."""
        self._settings = settings
        self._base_model = base_model
        self._actor = actor
        self._actors: list[Actor] = []
        self._gpus: Reservation | None = None
        self.opened: dict[str, int] = {}
        """Step of each run that the ranks hold in memory; other runs must be opened first."""
        self._figures: dict[str, TokenFigures] = {}
        """Of the steps that are in memory only."""
        self.ranks: list[LoadedRank] = []
        self.limits: Limits
        """Limits of the ranks, known once they have started for the first time."""
        self.linear_layers: list[str] = []
        """Names of the layers that an adapter may sit on; known once the ranks have loaded the model."""

    async def start(self, shared_devices: str | None = None) -> None:
        """Start all ranks and load the base model on each. `shared_devices` are the engines' GPUs."""
        settings = self._settings
        port = free_port()
        shared = shared_devices.split(",") if shared_devices else []
        seats = seat_ranks(settings.num_ranks, shared)
        if settings.device == "cuda" and None in seats:
            self._gpus = await Reservation.make([1] * seats.count(None))
        for rank, device in enumerate(seats):
            options: dict[str, object] = {"num_cpus": 0}
            if self._gpus is not None and device is None:
                options |= self._gpus.options(rank - len(shared))
            log_path = str(settings.logs_dir / f"trainer-{rank}.log")
            self._actors.append(Actor(self._actor, options, log_path, device))
        loading = [actor.call("load", self._arguments(rank, port)) for rank, actor in enumerate(self._actors)]
        self.ranks = await self._together(loading, "trainer_start", "loading the trainer")
        self.limits = limits_of(self.ranks[0])
        self.linear_layers = self.ranks[0]["linear_layers"]
        log.info("trainer ready: %s", self.ranks)

    def _arguments(self, rank: int, port: int) -> RankArguments:
        settings = self._settings
        arguments: RankArguments = {
            "rank": rank,
            "world_size": settings.num_ranks,
            "master_address": "127.0.0.1",
            "master_port": port,
            "base_model": self._base_model,
            "dtype": settings.dtype,
            "num_threads": settings.compute.rank_threads,
            "device": settings.device,
        }
        if settings.micro_batch_tokens is not None:
            arguments["max_micro_batch_tokens"] = settings.micro_batch_tokens
        if settings.checkpoint_layers is not None:
            arguments["checkpoint_layers"] = settings.checkpoint_layers
        if settings.four_bit_base:
            arguments["four_bit"] = True
        return arguments

    @property
    def running(self) -> bool:
        """True from `start` until the ranks are stopped."""
        return bool(self._actors)

    async def stop(self) -> None:
        """Kill all ranks; the runs in their memory are lost."""
        for actor in self._actors:
            actor.kill()
        self._actors, self.opened, self.ranks = [], {}, []
        self._figures.clear()
        if self._gpus is not None:
            self._gpus.release()
            self._gpus = None

    async def open_run(self, run: str, lora: LoraSettings, step: int, checkpoint: Path | None) -> None:
        """Open the run at this step on all ranks, unless they already hold it."""
        if self.opened.get(run) == step:
            return
        path = None if checkpoint is None else str(checkpoint)
        await self._all("open_run", run, lora, path, deadline="publish")
        self.opened[run] = step
        await self._make_room(run)

    async def start_run(self, run: str, lora: LoraSettings, source: Path, *, whole: bool) -> None:
        """Open the run at step 0 with the adapter in `source`; `whole`: and with its optimizer."""
        self.opened.pop(run, None)
        await self._all("start_run", run, lora, str(source), whole, deadline="publish")
        self.opened[run] = 0
        await self._make_room(run)

    async def _make_room(self, run: str) -> None:
        """Let the ranks close runs that were not used for longest, if memory is short beside this one."""
        if len(self.opened) == 1:
            return
        closed: list[str] = (await self._all("make_room", run, deadline="handover"))[0]
        for name in closed:
            log.info("run %s leaves the trainer's memory for run %s", name, run)
            self.opened.pop(name, None)

    async def forget_run(self, run: str) -> None:
        """Discard a run's state in memory, which may be ahead of the committed step."""
        self.opened.pop(run, None)
        self._figures.pop(run, None)
        if self.running:
            await self._all("close_run", run, deadline="handover")

    async def train_step(
        self, run: str, sequences: list[TrainingSequence], settings: StepSettings, reference: Path | None
    ) -> dict[str, float]:
        """Train one step; it exists in memory only until it is saved, and not at all if this raises.

        The step is planned here, once. Each rank receives its own micro-batches through Ray's object store.
        """
        self._check_running("train_step")
        packing = await asyncio.to_thread(pack_step, sequences, settings, self.limits, len(self._actors))
        batches = await asyncio.to_thread(_sent, packing)
        self._check_running("train_step")
        step = self.opened.pop(run)
        checkpoint = None if reference is None else str(reference)
        calls = [
            actor.call("do", "train_step", run, batch, settings, checkpoint)
            for actor, batch in zip(self._actors, batches, strict=True)
        ]
        results = await self._together(calls, "step", "the trainer's train_step")
        logprobs = await self._all("token_logprobs", deadline="score")
        self._figures[run] = await asyncio.to_thread(token_figures, packing, logprobs)
        self.opened[run] = step + 1
        return results[0]

    async def score(self, run: str, token_ids: list[list[int]]) -> list[list[float]]:
        """Return log-probabilities under the run's policy as it is in memory."""
        return (await self._all("score", run, token_ids, deadline="score"))[0]

    async def save(self, run: str, staging: Path) -> None:
        """Write the run as it is in memory, and the figures of the tokens that its last step trained on."""
        await self._all("save", run, str(staging), deadline="publish")
        if (figures := self._figures.pop(run, None)) is not None:
            await asyncio.to_thread(figures.write, staging)

    async def export_merged(self, run: str, directory: Path) -> None:
        await self._all("export_merged", run, str(directory), self._settings.dtype, deadline="publish")

    async def off_device(self) -> None:
        """Move all ranks' weights and moments to host memory and free the devices; nothing on a CPU."""
        await self._all("off_device", deadline="handover")

    async def on_device(self) -> None:
        """Move them back; training and scoring need them there."""
        await self._all("on_device", deadline="handover")

    def _check_running(self, method: str) -> None:
        if not self._actors:
            raise ActorDied(f"the trainer's {method} failed: its ranks were stopped")

    async def _all(self, method: str, *args: object, deadline: str) -> list[Any]:
        self._check_running(method)
        calls = [actor.call("do", method, *args) for actor in self._actors]
        return await self._together(calls, deadline, f"the trainer's {method}")

    async def _together(self, calls: list[Awaitable[Any]], deadline: str, what: str) -> list[Any]:
        """Wait for all ranks; if one fails while another goes on, or time is up, kill them all.

        `deadline` is the name of one of the settings' deadlines.
        """
        try:
            seconds = getattr(self._settings.deadlines, deadline)
            return await gather(calls, seconds, what, hint=f"{option_of(deadline)} sets the deadline")
        except InsituError as error:
            if isinstance(error, ActorDied | DeadlineExceeded) or not await ended(calls, _GRACE_SECONDS):
                log.warning("all trainer ranks are stopped: %s", error)
                await self.stop()
            raise


def _sent(packing: Packing) -> list[ray.ObjectRef[RankBatch]]:
    """Put each rank's micro-batches into the object store, one rank after the other; return references."""
    check_room(packing.num_bytes, f"a step of {len(packing.shares)} sequences")
    return [ray.put(packing.rank_batch(rank)) for rank in range(len(packing.ranks))]
