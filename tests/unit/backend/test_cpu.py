"""Reading the machine: the kernel's files of several kinds of machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from insitu.backend.plan import cpu
from insitu.backend.plan.cpu import parse_features, read_cpu, read_quota

XEON = (
    "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile amx_bf16\n\n"
    "processor\t: 1\nflags\t\t: fpu\n"
)
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd evtstrm sve bf16 svebf16\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_features_of_the_first_cpu() -> None:
    assert parse_features(XEON) == {"avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"}
    assert parse_features(GRAVITON) == {"asimd", "sve", "bf16", "svebf16"}
    assert parse_features("") == frozenset()


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        # An ancestor may be tighter.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "5:devices:/x\n2:cpu,cpuacct:/pod\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
    ],
)
def test_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert read_quota(write(tmp_path, files)) == quota


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")
def test_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_allowed_cpus", lambda: [0, 1, 4, 5])
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    topology = {siblings.format(one): f"{one % 4},{one % 4 + 4}\n" for one in (0, 1, 4, 5)}
    root = write(tmp_path, {"proc/cpuinfo": XEON, **topology})
    facts = read_cpu(root, {"ONEDNN_MAX_CPU_ISA": "AVX2", "VLLM_CPU_OMP_THREADS_BIND": ""})
    assert facts.cores == ((0, 4), (1, 5))
    assert "amx_bf16" in facts.features
    assert (facts.quota, facts.max_isa, facts.omp_bind) == (None, "AVX2", None)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux names the allowed CPUs")
def test_this_machine() -> None:
    facts = read_cpu()
    assert sorted(one for core in facts.cores for one in core) == sorted(os.sched_getaffinity(0))


def test_an_unknown_topology_has_no_siblings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_allowed_cpus", lambda: [0, 1])
    assert read_cpu(tmp_path, {}).cores == ((0,), (1,))
