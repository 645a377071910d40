"""Read the facts about this machine's CPU that decide how fast a model runs on it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_FEATURES = frozenset(
    {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "sve", "bf16", "svebf16"}
)
_SYSCTL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """The CPU resources available to this process."""

    architecture: str
    """As in `platform.machine()`: x86_64, aarch64, arm64."""
    features: frozenset[str]
    """Instruction sets, in the kernel's spelling."""
    cores: tuple[tuple[int, ...], ...]
    """The logical CPUs that this process may run on, one tuple per physical core."""
    quota: float | None = None
    """The cgroup's CPU limit, in CPUs; None without a limit."""
    max_isa: str | None = None
    """ONEDNN_MAX_CPU_ISA: the newest instruction set that the kernels may use."""
    omp_bind: str | None = None
    """VLLM_CPU_OMP_THREADS_BIND, if the user has set it."""

    @property
    def num_logical(self) -> int:
        return sum(len(core) for core in self.cores)


def read_cpu(root: Path = _ROOT, environment: Mapping[str, str] = os.environ) -> CpuFacts:
    """Read the facts of the running machine. `root` stands in for / in tests."""
    allowed = _allowed_cpus()
    return CpuFacts(
        architecture=platform.machine(),
        features=_features(root),
        cores=_group_by_core(root, allowed),
        quota=read_quota(root),
        max_isa=environment.get("ONEDNN_MAX_CPU_ISA") or None,
        omp_bind=environment.get("VLLM_CPU_OMP_THREADS_BIND") or None,
    )


def parse_features(cpuinfo: str) -> frozenset[str]:
    """Return the relevant instruction sets that /proc/cpuinfo lists for the first CPU."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return _FEATURES & frozenset(value.split())
    return frozenset()


def read_quota(root: Path = _ROOT) -> float | None:
    """Return the smallest CPU quota of this process's cgroup and its ancestors, in CPUs."""
    quotas: list[float] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files = _upwards(root / "sys/fs/cgroup", path)
            quotas += [quota for file in files if (quota := _quota_v2(file / "cpu.max")) is not None]
        elif "cpu" in controllers.split(","):
            files = _upwards(root / "sys/fs/cgroup" / controllers, path)
            quotas += [quota for file in files if (quota := _quota_v1(file)) is not None]
    return min(quotas, default=None)


def _upwards(mount: Path, path: str) -> list[Path]:
    """List a cgroup's directory and those of its ancestors, up to the mount."""
    own = mount / path.strip("/")
    return [own, *[parent for parent in own.parents if parent.is_relative_to(mount)]]


def _quota_v2(file: Path) -> float | None:
    fields = _text(file).split()
    return int(fields[0]) / int(fields[1]) if len(fields) == 2 and fields[0] != "max" else None


def _quota_v1(folder: Path) -> float | None:
    quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def _allowed_cpus() -> list[int]:
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _group_by_core(root: Path, allowed: list[int]) -> tuple[tuple[int, ...], ...]:
    """Group logical CPUs by the kernel's sibling lists; in an unknown topology each is its own core."""
    cores: dict[str, list[int]] = {}
    for cpu in allowed:
        siblings = _text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings or f"cpu{cpu}", []).append(cpu)
    return tuple(tuple(cpus) for cpus in cores.values())


def _features(root: Path) -> frozenset[str]:
    if sys.platform == "darwin":
        return _darwin_features()
    return parse_features(_text(root / "proc/cpuinfo"))


def _darwin_features() -> frozenset[str]:
    # sysctl fails with empty output on an unknown name: the feature is missing.
    asked = subprocess.run(
        ["sysctl", "-n", "hw.optional.arm.FEAT_BF16"],
        check=False,
        capture_output=True,
        text=True,
        timeout=_SYSCTL_SECONDS,
    )
    return frozenset({"bf16"}) if asked.stdout.strip() == "1" else frozenset()


def _text(path: Path) -> str:
    """Return a small file's text; empty if it cannot be read, as on other kernels."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
