"""Ray under `insitu serve`: start a private local cluster, or join one by address."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray.exceptions import RayActorError, RayTaskError

from insitu.backend.fleet.ray_door import LOOPBACK, asks_for_token, close_door
from insitu.backend.plan.devices.cluster import check_address
from insitu.backend.plan.settings import ServeSettings
from insitu.errors import CannotHonour, ChildFailed, DeadlineExceeded, InsituError

_SHARE_OF_MEMORY = 0.3
_LEAST_OBJECT_STORE_BYTES = 1 << 29
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
Result = TypeVar("Result")
log = logging.getLogger(__name__)


def start_ray(address: str | None, scratch: Path, state_dir: Path) -> None:
    """Start or join Ray. Call from the main thread: a local cluster is tied to the thread that started it.

    A cluster started here listens on loopback only and wants the token in `state_dir`; one that is joined
    keeps its own rules.
    """
    # Actors set their own threads and devices; Ray must not hide GPUs from trainer ranks that share them.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # engines and trainer are not background work
    if address is not None:
        check_address(address)
        ray.init(address=address, namespace="insitu", log_to_driver=False, logging_level=logging.ERROR)
        return
    close_door(state_dir)
    ray.init(
        namespace="insitu",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        # Nothing asks Ray for memory. Left to itself, it rejects a machine on which little is free just now.
        _memory=2**30,
        object_store_memory=_object_store_bytes(),
        _temp_dir=str(scratch / "ray"),
        _node_ip_address=LOOPBACK,
    )


def check_cluster(settings: ServeSettings) -> None:
    """Reject settings that the cluster which was joined cannot honour."""
    check_nodes(settings, ray.nodes())


def num_nodes(nodes: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of machines in the cluster, also of those that are away."""
    return len({str(node["NodeManagerAddress"]) for node in nodes})


def check_nodes(settings: ServeSettings, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Reject settings that several nodes cannot honour: what crosses nodes is an adapter, behind a token."""
    if num_nodes(nodes) == 1:
        return
    cluster = f"--ray-address {settings.ray_address}: the cluster has {num_nodes(nodes)} nodes"
    if settings.publication == "merged":
        raise CannotHonour(
            f"{cluster}, and merged weights are files of one node", hint="use --publication adapter"
        )
    if settings.placement == "shared":
        raise CannotHonour(
            f"{cluster}, and engines and trainer share devices on one node only",
            hint="use --placement dedicated",
        )
    if not asks_for_token():
        raise CannotHonour(
            f"{cluster} and asks for no token: whoever reaches Ray's port can run code in it",
            hint="set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH on every node, and start Ray again",
        )


def _object_store_bytes() -> int:
    """Return the limit of the object store, where a step's micro-batches wait for the ranks.

    Memory is taken only while a step is under way, and only as much as its batch needs. Beyond shared memory
    Ray would keep objects in files.
    """
    most = int(_SHARE_OF_MEMORY * psutil.virtual_memory().total)
    if _SHARED_MEMORY.is_dir():
        most = min(most, int(0.9 * psutil.disk_usage(str(_SHARED_MEMORY)).free))
    return max(most, _LEAST_OBJECT_STORE_BYTES)


def check_room(num_bytes: int, what: str) -> None:
    """Refuse what this node's object store cannot hold: Ray would write it to files, or wait for room."""
    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["NodeID"] == here]
    room = int(nodes[0]["Resources"].get("object_store_memory", 0)) if nodes else 0
    if num_bytes > room:
        raise CannotHonour(
            f"{what} takes {num_bytes / 2**20:.0f} MiB; Ray's object store holds {room / 2**20:.0f} MiB",
            hint=f"submit fewer groups per step, or free more of {_SHARED_MEMORY} and restart `insitu serve`",
        )


def stop_ray() -> None:
    """Disconnect from Ray; a cluster started here shuts down."""
    ray.shutdown()


class ActorDied(ChildFailed):
    """A Ray actor is gone: killed, crashed, or its node lost."""


class Actor:
    """An object in a process of its own. Ray's handles know neither its methods nor their results."""

    def __init__(self, kind: type, options: Mapping[str, object], *args: object) -> None:
        remote: Any = ray.remote(kind)
        self._handle: Any = remote.options(**options).remote(*args)

    def call(self, method: str, *args: object) -> Awaitable[Any]:
        """Start a call. Ray resolves references only as direct arguments, so they are passed flat."""
        return getattr(self._handle, method).remote(*args)

    def kill(self) -> None:
        """Kill it at once; an already dead one is no error."""
        ray.kill(self._handle, no_restart=True)


async def gather(
    calls: Sequence[Awaitable[Result]], deadline_seconds: float, what: str, hint: str = ""
) -> list[Result]:
    """Wait for all results; raise the first failure, or DeadlineExceeded naming `what`."""
    pending = [asyncio.ensure_future(_result(call)) for call in calls]
    try:
        async with asyncio.timeout(deadline_seconds):
            return list(await asyncio.gather(*pending))
    except TimeoutError as error:
        raise DeadlineExceeded(f"{what} did not finish in {deadline_seconds:g} s", hint=hint) from error
    except RayActorError as error:
        raise ActorDied(f"{what} failed: a Ray actor died ({_first_line(error)})") from error
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, InsituError):
            raise cause from error
        raise ChildFailed(f"{what} failed: {type(cause).__name__}: {cause}") from error
    finally:
        for task in pending:
            task.cancel()


async def ended(calls: Sequence[Awaitable[object]], seconds: float) -> bool:
    """Return True if every call ends within this time, whether it fails or not."""
    waiting = [asyncio.ensure_future(_result(call)) for call in calls]
    _, pending = await asyncio.wait(waiting, timeout=seconds)
    for task in pending:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return not pending


async def _result(call: Awaitable[Result]) -> Result:
    return await call


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
