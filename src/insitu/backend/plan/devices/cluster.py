"""Read the devices of a Ray cluster, all nodes of it, before anything is planned on them."""

from __future__ import annotations

import importlib
import logging
import platform
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from insitu.backend.plan.devices.driver import check_gpus
from insitu.backend.plan.devices.machine import Machine, host_memory, machine_of, visible_gpus
from insitu.errors import CannotHonour, ChildFailed, DeadlineExceeded, InsituError

_SECONDS = 60.0
_SAME = "check that insitu is installed on every node, in the same version"


def check_address(address: str) -> None:
    """Reject Ray's client protocol, which connects to nodes elsewhere."""
    if address.startswith("ray://"):
        raise CannotHonour(
            f"--ray-address {address}: the supervisor is on a node of the cluster, not a Ray client",
            hint="start Ray on this machine (ray start) and give the head's address, or leave the option out",
        )


def read_cluster_gpus(address: str, *, needed: bool = False) -> Machine | None:
    """Ask every node with GPUs about them, and leave the cluster again.

    None if the cluster has no GPUs; raises CannotHonour if they are needed.
    """
    from ray.exceptions import GetTimeoutError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray: Any = importlib.import_module("ray")  # its types are not known
    check_address(address)
    names = ""
    ray.init(address=address, namespace="insitu", log_to_driver=False, logging_level=logging.ERROR)
    try:
        nodes: list[dict[str, Any]] = [
            node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")
        ]
        names = ", ".join(str(node["NodeManagerAddress"]) for node in nodes)
        ask: Any = ray.remote(num_cpus=0)(_read_node)
        places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
        counts = [int(node["Resources"]["GPU"]) for node in nodes]
        calls = [
            ask.options(scheduling_strategy=place).remote(count)
            for place, count in zip(places, counts, strict=True)
        ]
        found = together(ray.get(calls, timeout=_SECONDS))
    except GetTimeoutError as error:
        raise DeadlineExceeded(
            f"the nodes of --ray-address {address} did not tell their GPUs in {_SECONDS:g} s ({names})",
            hint=_SAME,
        ) from error
    except RayTaskError as error:
        if isinstance(error.cause, InsituError):
            raise error.cause from error
        raise ChildFailed(
            f"a node of --ray-address {address} could not tell its GPUs: {error.cause}", hint=_SAME
        ) from error
    finally:
        ray.shutdown()
    if found is None and needed:
        raise CannotHonour(
            f"--device cuda: no node of --ray-address {address} has a GPU that Ray knows of",
            hint="start Ray on the machines with the GPUs (ray start --address …), or use --device cpu",
        )
    return found


def together(nodes: Sequence[Machine]) -> Machine | None:
    """Return the nodes as one machine, on which an engine is within a node; all count as the smallest."""
    if not nodes:
        return None
    hosts = [node.host_bytes for node in nodes if node.host_bytes is not None]
    capabilities = [node.capability for node in nodes if node.capability is not None]
    return Machine(
        sum(node.num_devices for node in nodes),
        min(node.device_bytes for node in nodes),
        len(nodes) * min(hosts) if hosts else None,
        max(node.used_bytes for node in nodes),
        min(capabilities, default=None),
        tuple(node.num_devices for node in nodes),
    )


def _read_node(count: int) -> Machine:
    """Return the GPUs of the node on which this runs, as many as Ray was told of.

    Where it was told of fewer, nobody says which: each counts as large as the smallest and as full as the
    fullest of all, and the newest are the ones that are checked.
    """
    gpus = visible_gpus({})
    newest = sorted(gpus, key=lambda gpu: gpu.capability or 0.0, reverse=True)[:count]
    try:
        check_gpus(newest)
    except CannotHonour as error:
        raise CannotHonour(f"on the node {platform.node()}: {error.message}", hint=error.hint) from error
    return replace(machine_of(gpus, host_memory()), num_devices=min(count, len(gpus)))
