"""Which GPUs and how much memory a machine has, from what the driver says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from insitu.backend.plan.compute import Asked, Kept, choose, gpu_dtype
from insitu.backend.plan.cpu import read_cpu
from insitu.backend.plan.devices import driver
from insitu.backend.plan.devices.machine import (
    Gpu,
    Machine,
    has_cuda,
    host_memory,
    list_gpus,
    machine_of,
    parse_gpus,
    read_machine,
    visible,
)
from insitu.errors import CannotHonour

TWO = (
    "0, GPU-11aa, 24564, 512, 8.9, 580.65.06, NVIDIA GeForce RTX 4090\n"
    "1, GPU-22bb, 81559, 0, 9.0, 580.65.06, NVIDIA H100 80GB HBM3\n"
)


def test_the_driver_s_tool_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{TWO.replace(chr(10), chr(92) + 'n')}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert [gpu.name for gpu in list_gpus()] == ["NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3"]
    found = read_machine({})
    assert (found.num_devices, found.device_bytes) == (2, 24564 * 2**20)
    assert (found.used_bytes, found.capability) == (512 * 2**20, 8.9)
    assert 23.4 < found.cuda_bytes / 2**30 < 23.65, "as CUDA says of this card"
    assert found.free_bytes == found.cuda_bytes - found.used_bytes
    assert found.host_bytes == host_memory()
    assert read_machine({"CUDA_VISIBLE_DEVICES": "1"}) == Machine(1, 81559 * 2**20, found.host_bytes, 0, 9.0)
    with pytest.raises(CannotHonour, match="no GPU is visible"):
        read_machine({"CUDA_VISIBLE_DEVICES": ""})
    tool.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(CannotHonour, match="--device-memory"):
        list_gpus()


@pytest.mark.parametrize(
    ("chosen", "seen"),
    [(None, [0, 1]), ("1", [1]), ("1,0", [1, 0]), ("GPU-22", [1]), ("0,-1,1", [0]), ("", []), ("7", [])],
)
def test_visible_devices_are_cuda_s(chosen: str | None, seen: list[int]) -> None:
    assert [gpu.index for gpu in visible(parse_gpus(TWO), chosen)] == seen


def test_an_unknown_size_is_an_error() -> None:
    card = Gpu(0, "GPU-1", "A100, PCIe", 40960 * 2**20, 0, None, "550.1")
    assert parse_gpus("0, GPU-1, 40960, [N/A], [N/A], 550.1, A100, PCIe") == [card]
    with pytest.raises(CannotHonour, match=r"\[N/A\]"):
        parse_gpus("0, GPU-1, [N/A], 0, 12.1, 580.1, GB10")


@pytest.mark.parametrize(
    ("gpu", "cuda", "said"),
    [
        (Gpu(0, "", "H100", 1, 0, 9.0, "535.1"), 13, r"driver is 535\.1, .*CUDA 13, which needs 580"),
        (Gpu(0, "", "V100", 1, 0, 7.0, "580.1"), 13, r"V100 has compute capability 7\.0, .* needs 7\.5"),
        (Gpu(0, "", "H100", 1, 0, 9.0, "580.1"), 13, "no C compiler"),
    ],
)
def test_a_gpu_that_would_fail_later_is_rejected(
    gpu: Gpu, cuda: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "installed_cuda", lambda: cuda)
    monkeypatch.setattr(driver, "compiler", lambda: None if "compiler" in said else "/usr/bin/cc")
    with pytest.raises(CannotHonour, match=said):
        driver.check_gpus([gpu])
    monkeypatch.setattr(driver, "compiler", lambda: "/usr/bin/cc")
    monkeypatch.setattr(driver, "installed_cuda", lambda: 12)
    driver.check_gpus([Gpu(0, "", "T4", 1, 0, 7.5, "535.1")])


def test_a_few_mebibytes_of_the_driver_s_are_no_use() -> None:
    gpus = parse_gpus("0, GPU-1, 24564, 3, 8.9, 580.1, RTX 4090")
    assert machine_of(gpus, 1).used_bytes == 0
    assert machine_of(parse_gpus("0, GPU-1, 24564, 24564, 8.9, 580.1, RTX 4090"), 1).free_bytes == 0


@pytest.mark.parametrize("kept", [None, Kept("mine", "bfloat16")])
def test_bfloat16_is_rejected_where_there_is_none(kept: Kept | None) -> None:
    asked = Asked("bfloat16") if kept is None else Asked()
    with pytest.raises(CannotHonour, match=r"compute capability 7\.5 have none"):
        choose(read_cpu(), "cuda", asked, kept, capability=7.5)
    assert choose(read_cpu(), "cuda", asked, kept, capability=8.0).dtype == "bfloat16"


def test_a_card_without_bfloat16_computes_in_float16() -> None:
    assert gpu_dtype(7.5)[0] == "float16"
    assert gpu_dtype(8.0)[0] == gpu_dtype(None)[0] == "bfloat16"


def test_linux_and_wsl2_have_cuda(tmp_path: Path) -> None:
    assert not has_cuda(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    assert not has_cuda(tmp_path), "WSL2 without NVIDIA's library"
    library = tmp_path / "usr/lib/wsl/lib/libcuda.so.1"
    library.parent.mkdir(parents=True)
    library.touch()
    assert has_cuda(tmp_path)
    library.unlink()
    (tmp_path / "dev/nvidiactl").touch()
    assert has_cuda(tmp_path)


def test_a_cgroup_limits_the_memory(tmp_path: Path) -> None:
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    limit = tmp_path / "sys/fs/cgroup/memory.max"
    limit.write_text("max\n")
    everything = host_memory(tmp_path)
    limit.write_text("1073741824\n")
    assert host_memory(tmp_path) == 2**30 < everything
