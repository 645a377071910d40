"""Read which devices and how much memory this machine has, without torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from insitu.errors import CannotHonour

_ROOT = Path("/")
_LEAST_REMEMBERED, _ID_BYTES = 32 * 2**20, 4
_SMI_SECONDS = 20.0
_KEPT_BY_DRIVER = int(0.45 * 2**30)
"""An RTX 4090 reports 24,564 MiB, and CUDA has 23.65 GiB of it; an H100 79.65 and 79.18 GiB."""
_LEAST_USED = 64 * 2**20
"""A driver reports a few MiB on an idle GPU."""
_FIELDS = ("index", "uuid", "memory.total", "memory.used", "compute_cap", "driver_version", "name")
_WSL_LIBRARIES = "usr/lib/wsl/lib"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU as its driver reports it."""

    index: int
    uuid: str
    name: str
    num_bytes: int
    used_bytes: int = 0
    """Memory that processes have now."""
    capability: float | None = None
    """Compute capability; None if the driver does not say."""
    driver: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices to plan for; all count as large as the smallest, and as full as the fullest."""

    num_devices: int
    device_bytes: int
    """As the driver reports it; CUDA has a little less."""
    host_bytes: int | None = None
    """RAM; None if it is not known, as for another machine."""
    used_bytes: int = 0
    """Memory of a device that other processes have, such as a desktop."""
    capability: float | None = None
    """The least compute capability; None if it is not known."""
    nodes: tuple[int, ...] = ()
    """The GPUs of each node; empty on one machine."""

    @property
    def most_parallel(self) -> int:
        """The most GPUs that one engine can have: it is on one node."""
        return max(self.nodes, default=self.num_devices)

    def most_engines(self, num_devices: int) -> int:
        """Return how many engines of so many GPUs there is room for."""
        return sum(node // num_devices for node in self.nodes or (self.num_devices,))

    @property
    def cuda_bytes(self) -> int:
        """The memory of a device that CUDA gives to processes."""
        return self.device_bytes - _KEPT_BY_DRIVER

    @property
    def free_bytes(self) -> int:
        """The memory of a device that is there for engine and trainer."""
        return max(0, self.cuda_bytes - self.used_bytes)


def has_cuda(root: Path = _ROOT) -> bool:
    """Return True where an NVIDIA driver gives access to a GPU: Linux, or Linux inside Windows (WSL2)."""
    wsl = (root / "dev/dxg").exists() and (root / _WSL_LIBRARIES / "libcuda.so.1").exists()
    return (root / "dev/nvidiactl").exists() or wsl


def read_machine(environment: Mapping[str, str] = os.environ) -> Machine:
    """Return the visible GPUs of this machine and its RAM."""
    return machine_of(visible_gpus(environment), host_memory())


def machine_of(gpus: Sequence[Gpu], host_bytes: int) -> Machine:
    """Return the machine that these GPUs and so much RAM make."""
    capabilities = [gpu.capability for gpu in gpus if gpu.capability is not None]
    return Machine(
        len(gpus),
        min(gpu.num_bytes for gpu in gpus),
        host_bytes,
        used if (used := max(gpu.used_bytes for gpu in gpus)) >= _LEAST_USED else 0,
        min(capabilities, default=None),
    )


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return the GPUs that this process may use, or raise CannotHonour."""
    gpus = visible(list_gpus(), environment.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        raise CannotHonour(
            "no GPU is visible to this process", hint="check nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    return gpus


def list_gpus(root: Path = _ROOT) -> list[Gpu]:
    """Ask the driver's own tool, which needs neither torch nor a package."""
    tool = shutil.which("nvidia-smi") or str(root / _WSL_LIBRARIES / "nvidia-smi")
    query = [f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            [tool, *query], check=True, capture_output=True, text=True, timeout=_SMI_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotHonour(
            f"the memory of the GPUs is not known: nvidia-smi failed ({error})",
            hint="install the driver's tools, or plan with --device-memory 24GiB --num-devices 1",
        ) from error
    return parse_gpus(answer.stdout)


def parse_gpus(text: str) -> list[Gpu]:
    """Parse the lines of `nvidia-smi`: index, UUID, MiB, MiB in use, compute capability, driver, name."""
    gpus: list[Gpu] = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",", len(_FIELDS) - 1)]
        if len(fields) != len(_FIELDS) or not fields[0].isdigit() or not fields[2].isdigit():
            raise CannotHonour(
                f"nvidia-smi does not say how much memory a GPU has: {line!r}",
                hint="plan with --device-memory and --num-devices",
            )
        index, uuid, total, used, capability, driver, name = fields
        gpus.append(
            Gpu(
                int(index),
                uuid,
                name,
                int(total) * 2**20,
                int(used) * 2**20 if used.isdigit() else 0,
                float(capability) if re.fullmatch(r"\d+\.\d+", capability) else None,
                driver,
            )
        )
    return gpus


def visible(gpus: list[Gpu], chosen: str | None) -> list[Gpu]:
    """Apply CUDA_VISIBLE_DEVICES as CUDA does: indices or starts of UUIDs, up to the first unknown one."""
    if chosen is None:
        return gpus
    seen: list[Gpu] = []
    for entry in (entry.strip() for entry in chosen.split(",")):
        found = [gpu for gpu in gpus if entry and (entry == str(gpu.index) or gpu.uuid.startswith(entry))]
        if not found:
            break
        seen.append(found[0])
    return seen


def host_memory(root: Path = _ROOT) -> int:
    """Return the RAM that this process may use: the machine's, or its cgroup's limit."""
    total = int(psutil.virtual_memory().total)
    limits = (root / "sys/fs/cgroup" / name for name in ("memory.max", "memory/memory.limit_in_bytes"))
    found = [int(text) for path in limits if path.is_file() and (text := path.read_text().strip()).isdigit()]
    return min([total, *found])


def remembered_tokens(num_bytes: int, num_gateways: int) -> int:
    """Return how many ids of recent calls each gateway keeps: all of them, a 64th of the RAM."""
    return max(_LEAST_REMEMBERED, num_bytes // 64 // _ID_BYTES // num_gateways)
