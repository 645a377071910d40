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
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from insitu.backend.fleet.cluster import Actor, ActorDied, check_room, ended, gather
from insitu.backend.fleet.node import (
    Files,
    Node,
    Place,
    interface_of,
    put_files,
    read_files,
    this_node,
    write_files,
)
from insitu.backend.fleet.placement import Reservation, reserve, seat_ranks
from insitu.backend.fleet.rank_info import LoadedRank, RankArguments, limits_of
from insitu.backend.fleet.ray_door import LOOPBACK
from insitu.backend.fleet.token_figures import TokenFigures, token_figures
from insitu.backend.plan.engine import WHOLE_PINNED, allocator_settings
from insitu.backend.plan.settings import ServeSettings, option_of
from insitu.errors import DeadlineExceeded, InsituError
from insitu.system.logs import log_to
from insitu.training.packing import Limits, Packing, RankBatch, pack_step
from insitu.types import LoraSettings, StepSettings, TrainingSequence

if TYPE_CHECKING:
    from insitu.backend.fleet.trainer_rank import TrainerRank

_GRACE_SECONDS = 3.0
"""After one rank's failure, the others have this long to fail alike; one that has not waits for the dead."""
log = logging.getLogger(__name__)


class _RankActor:
    """Runs inside a Ray actor; torch is imported there, never in the supervisor."""

    def __init__(self, log_path: str, devices: str | None, home: str | None = None) -> None:
        """`home`: the supervisor's node. On another one, log and files are in a folder there."""
        self._node = Node(home, Path(log_path))
        log_to(self._node.log)
        if devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices
        self._rank: TrainerRank | None = None

    def place(self) -> Place:
        """Return where this rank runs, with a port for the ranks to meet at."""
        return self._node.place()

    def keep(self, digest: str, files: Files) -> str:
        """Write a directory that the supervisor sent; return its path on this node."""
        return self._node.keep(digest, files)

    def discard(self, digest: str) -> None:
        """Remove a directory that was sent."""
        self._node.discard(digest)

    def load(self, arguments: RankArguments) -> LoadedRank:
        if not arguments.get("four_bit"):
            # PEFT imports it wherever it is installed; that takes seconds, and nothing else uses it.
            sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type]
        if arguments["device"] == "cuda":
            # Rows differ in length; without it, what they leave behind does not fit the next ones.
            os.environ.update(allocator_settings("expandable_segments:True", WHOLE_PINNED))
        if arguments["master_address"] != LOOPBACK:
            _meet_by(ray.util.get_node_ip_address())
        from insitu.backend.fleet.trainer_rank import TrainerRank

        self._rank = TrainerRank(**arguments)
        return {**self._rank.info(), "pid": os.getpid()}

    def do(self, method: str, *args: object) -> object:
        return getattr(self._rank, method)(*args)

    def save(self, run: str) -> Files:
        """Return the files of the run's checkpoint, of which rank 0 has all."""
        with tempfile.TemporaryDirectory() as folder:
            self.do("save", run, folder)
            return read_files(Path(folder))


def _meet_by(address: str) -> None:
    """Let ranks on other nodes reach this one by its address; by itself, Gloo may tell them the loopback one.

    Whoever started Ray on this node may have chosen an interface already.
    """
    interface = interface_of(address)
    if interface is None:
        log.warning("no network interface here has the address %s: Gloo and NCCL choose one", address)
        return
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, interface)


class TrainerGroup:
    """Starts and stops all ranks, and calls them together."""

    def __init__(self, settings: ServeSettings, base_model: str, actor: type = _RankActor) -> None:
        """`actor` runs each rank; another one is for fault injection."""
        self._settings = settings
        self._base_model = base_model
        self._actor = actor
        self._actors: list[Actor] = []
        self._away: set[int] = set()
        """Ranks on other nodes than the supervisor's."""
        self._seats: Reservation | None = None
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
        shared = shared_devices.split(",") if shared_devices else []
        seats = seat_ranks(settings.num_ranks, shared)
        if own := seats.count(None):
            self._seats = await reserve(settings.device, [1] * own, settings.deadlines.trainer_start)
        for rank, device in enumerate(seats):
            options: dict[str, object] = {"num_cpus": 0}
            if self._seats is not None and device is None:
                options |= self._seats.options(rank - len(shared))
            log_path = str(settings.logs_dir / f"trainer-{rank}.log")
            self._actors.append(Actor(self._actor, options, log_path, device, this_node()))
        asking = [actor.call("place") for actor in self._actors]
        places: list[Place] = await self._together(asking, "trainer_start", "starting the trainer")
        self._away = {rank for rank, place in enumerate(places) if not place.is_home}
        address, port = places[0].address if self._away else LOOPBACK, places[0].port
        loading = [
            actor.call("load", self._arguments(rank, address, port))
            for rank, actor in enumerate(self._actors)
        ]
        self.ranks = await self._together(loading, "trainer_start", "loading the trainer")
        self.limits = limits_of(self.ranks[0])
        self.linear_layers = self.ranks[0]["linear_layers"]
        log.info("trainer ready: %s", self.ranks)

    def _arguments(self, rank: int, address: str, port: int) -> RankArguments:
        settings = self._settings
        arguments: RankArguments = {
            "rank": rank,
            "world_size": settings.num_ranks,
            "master_address": address,
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
            arguments["kept_tokens"] = settings.kept_tokens
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
        self._away.clear()
        self._figures.clear()
        if self._seats is not None:
            self._seats.release()
            self._seats = None

    async def open_run(self, run: str, lora: LoraSettings, step: int, checkpoint: Path | None) -> None:
        """Open the run at this step on all ranks, unless they already hold it."""
        if self.opened.get(run) == step:
            return
        async with self._paths(checkpoint) as paths:
            await self._each("open_run", [(run, lora, path) for path in paths], deadline="publish")
        self.opened[run] = step
        await self._make_room(run)

    async def start_run(self, run: str, lora: LoraSettings, source: Path, *, whole: bool) -> None:
        """Open the run at step 0 with the adapter in `source`; `whole`: and with its optimizer."""
        self.opened.pop(run, None)
        async with self._paths(source) as paths:
            await self._each("start_run", [(run, lora, path, whole) for path in paths], deadline="publish")
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
        async with self._paths(reference) as paths:
            given = [(run, batch, settings, path) for batch, path in zip(batches, paths, strict=True)]
            results = await self._each("train_step", given, deadline="step")
        logprobs = await self._all("token_logprobs", deadline="score")
        self._figures[run] = await asyncio.to_thread(token_figures, packing, logprobs)
        self.opened[run] = step + 1
        return results[0]

    async def score(self, run: str, token_ids: list[list[int]]) -> list[list[float]]:
        """Return log-probabilities under the run's policy as it is in memory."""
        return (await self._all("score", run, token_ids, deadline="score"))[0]

    async def save(self, run: str, staging: Path) -> None:
        """Write the run as it is in memory, and the figures of the tokens that its last step trained on."""
        if 0 in self._away:
            files: list[Files] = await self._together(
                [actor.call("save", run) for actor in self._actors], "publish", "the trainer's save"
            )
            await asyncio.to_thread(write_files, files[0], staging)
        else:
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
        return await self._each(method, [args] * len(self._actors), deadline=deadline)

    async def _each(self, method: str, arguments: Sequence[tuple[object, ...]], deadline: str) -> list[Any]:
        """Call a method of all ranks, each with its own arguments."""
        self._check_running(method)
        given = zip(self._actors, arguments, strict=True)
        calls = [actor.call("do", method, *args) for actor, args in given]
        return await self._together(calls, deadline, f"the trainer's {method}")

    @asynccontextmanager
    async def _paths(self, directory: Path | None) -> AsyncGenerator[list[str | None]]:
        """Give the path of a directory for every rank; ranks on other nodes get its files for this block."""
        paths = [None if directory is None else str(directory)] * len(self._actors)
        if directory is None or not self._away:
            yield paths
            return
        digest, files = await asyncio.to_thread(put_files, directory)
        away = [(rank, self._actors[rank]) for rank in sorted(self._away)]
        sending = [actor.call("keep", digest, files) for _, actor in away]
        sent: list[str] = await self._together(sending, "publish", f"sending {directory.name} to the trainer")
        for (rank, _), path in zip(away, sent, strict=True):
            paths[rank] = path
        yield paths
        # After a failure, they are there for the next attempt.
        discarding = [actor.call("discard", digest) for _, actor in away]
        await self._together(discarding, "handover", f"removing {directory.name} from the trainer")

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
