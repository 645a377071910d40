"""Placement of engines and trainer ranks: how many GPUs each takes, and the Ray groups that hold them.

Shared placement: the ranks sit on the engines' GPUs, in order, and ranks beyond those take free GPUs.
Dedicated placement: engines and ranks have GPUs of their own. No two ranks ever share a GPU, because NCCL
cannot connect them. What cannot be met is rejected before anything starts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from insitu.backend.fleet.cluster import check_cluster, num_nodes
from insitu.backend.plan.compute import Placement
from insitu.backend.plan.engine import Device, EngineSettings
from insitu.backend.plan.settings import ServeSettings
from insitu.errors import CannotHonour, DeadlineExceeded

_FREE_SECONDS = 10.0
"""Ray may take seconds to count the GPUs of an actor that has just ended as free."""
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class GpuDemand:
    """The engines and ranks of one base model, which need GPUs."""

    placement: Placement
    num_replicas: int
    tensor_parallel_size: int
    num_ranks: int

    @classmethod
    def of(cls, settings: ServeSettings, engine: EngineSettings) -> GpuDemand:
        return cls(settings.placement, settings.num_replicas, engine.tensor_parallel_size, settings.num_ranks)

    @property
    def engine_gpus(self) -> int:
        """The GPUs that all engines take together."""
        return self.num_replicas * self.tensor_parallel_size

    @property
    def num_gpus(self) -> int:
        """The GPUs that engines and ranks take together."""
        if self.placement == "shared":
            return max(self.engine_gpus, self.num_ranks)
        return self.engine_gpus + self.num_ranks

    def check(self, there: int) -> None:
        """Reject a demand that `there` GPUs cannot meet; say what is missing."""
        missing = f"this machine has {there}; {self.num_gpus - there} more would be needed"
        if self.tensor_parallel_size > there:
            raise CannotHonour(
                f"tensor parallel size {self.tensor_parallel_size} needs as many GPUs for one engine, "
                f"but {missing}",
                hint=f"use a tensor parallel size of at most {there}" if there else "serve with --device cpu",
            )
        if self.num_gpus <= there:
            return
        engines = (
            f"{self._engines()} {'needs' if self.num_replicas == 1 else 'need'} {_gpus(self.engine_gpus)}"
        )
        if self.engine_gpus > there:
            fitting = there // self.tensor_parallel_size
            raise CannotHonour(
                f"{engines}, but {missing}",
                hint=f"use --replicas {fitting}, or a smaller tensor parallel size",
            )
        if self.num_ranks > there:
            raise CannotHonour(
                f"{self.num_ranks} trainer ranks need a GPU each (NCCL refuses two on one), but {missing}",
                hint=f"use --trainer-ranks {there} or fewer",
            )
        raise CannotHonour(
            f"dedicated placement: {engines} and the trainer {self.num_ranks} of its own, but {missing}",
            hint="use --placement shared, or fewer --replicas or --trainer-ranks",
        )

    def _engines(self) -> str:
        one = "an engine" if self.num_replicas == 1 else f"{self.num_replicas} engines"
        parallel = self.tensor_parallel_size
        return one if parallel == 1 else f"{one} of tensor parallel size {parallel}"


def seat_ranks(num_ranks: int, shared_devices: Sequence[str]) -> list[str | None]:
    """Return each rank's device among the engines'; None for a rank that gets a GPU of its own."""
    own = num_ranks - len(shared_devices)
    return [*shared_devices[:num_ranks], *[None] * own]


async def check_placement(settings: ServeSettings, engine: EngineSettings) -> None:
    """Reject at once what this cluster could not hold even if nothing else ran on it."""
    await asyncio.to_thread(check_cluster, settings)
    if engine.device == "cuda":
        GpuDemand.of(settings, engine).check(await _count("GPU", ray.cluster_resources))


async def check_free(settings: ServeSettings, engine: EngineSettings) -> None:
    """Reject also what others in the cluster leave no room for."""
    await check_placement(settings, engine)
    if engine.device == "cpu":
        return
    needed = GpuDemand.of(settings, engine).num_gpus
    deadline = time.monotonic() + _FREE_SECONDS
    while (free := await _count("GPU", ray.available_resources)) < needed:
        if time.monotonic() > deadline:
            raise _occupied("GPU", needed, free, _FREE_SECONDS)
        await asyncio.sleep(_POLL_SECONDS)


async def reserve(device: Device, gpus: Sequence[int], seconds: float = _FREE_SECONDS) -> Reservation | None:
    """Reserve places for actors that use so many GPUs each; wait this long for them.

    Without GPUs an actor takes a processor of a node of the cluster; on one node that needs no reservation.
    """
    apart = num_nodes(await asyncio.to_thread(ray.nodes)) > 1
    if device == "cuda":
        return await Reservation.make("GPU", gpus, apart, seconds)
    return await Reservation.make("CPU", [1] * len(gpus), apart, seconds) if apart else None


class Reservation:
    """Resources that Ray holds for actors until they are released, also while one of them restarts."""

    def __init__(self, group: PlacementGroup) -> None:
        self._group = group

    @classmethod
    async def make(cls, kind: str, numbers: Sequence[int], apart: bool, seconds: float) -> Reservation:
        """Reserve so many for each actor, which finds them on one node; `apart`: actors may be on several."""
        strategy = "PACK" if apart else "STRICT_PACK"
        group = placement_group([{kind: number} for number in numbers], strategy=strategy)
        async with AsyncExitStack() as on_failure:
            on_failure.callback(remove_placement_group, group)
            if not await asyncio.to_thread(group.wait, seconds):
                raise _occupied(kind, sum(numbers), await _count(kind, ray.available_resources), seconds)
            on_failure.pop_all()
        return cls(group)

    def options(self, index: int) -> dict[str, object]:
        """Return the Ray options of the actor with this index."""
        strategy = PlacementGroupSchedulingStrategy(self._group, index)
        ((kind, number),) = self._group.bundle_specs[index].items()
        return {f"num_{kind.lower()}s": number, "scheduling_strategy": strategy}

    def release(self) -> None:
        """Return them; Ray kills what still runs there."""
        remove_placement_group(self._group)


async def _count(kind: str, ask: Callable[[], Mapping[str, float]]) -> int:
    return int((await asyncio.to_thread(ask)).get(kind, 0))


def _occupied(kind: str, needed: int, free: int, seconds: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"{needed} {kind}{' was' if needed == 1 else 's were'} needed and {free} became free in "
        f"{seconds:.0f} s: "
        "other actors of this Ray cluster hold the rest, or nodes are away",
        hint="`ray list actors` and `ray list nodes` show them; end them, or leave out --ray-address",
    )


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"
