"""Check a GPU before anything is started on it: the driver for this CUDA, its generation, a compiler."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from insitu.backend.plan.devices.machine import Gpu
from insitu.errors import CannotHonour

_LEAST_CAPABILITY = {12: 7.0, 13: 7.5}
"""The oldest generation for a major version of CUDA: Volta, then Turing."""
_LEAST_DRIVER = {12: 525, 13: 580}
"""NVIDIA's oldest driver, likewise."""
_RUNTIMES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
_COMPILERS = ("gcc", "clang")


def check_gpus(gpus: Sequence[Gpu]) -> None:
    """Raise CannotHonour for a GPU or a driver on which engine and trainer would fail minutes later."""
    cuda = installed_cuda()
    oldest = _LEAST_CAPABILITY.get(cuda or 0, min(_LEAST_CAPABILITY.values()))
    for gpu in gpus:
        if gpu.capability is not None and gpu.capability < oldest:
            raise CannotHonour(
                f"{gpu.name} has compute capability {gpu.capability}, and vLLM needs {oldest}",
                hint="serve on a newer GPU, or with --device cpu",
            )
        major = gpu.driver.partition(".")[0]
        least = _LEAST_DRIVER.get(cuda or 0)
        if least is not None and major.isdigit() and int(major) < least:
            raise CannotHonour(
                f"the NVIDIA driver is {gpu.driver}, and the installed torch was built for CUDA {cuda}, "
                f"which needs {least} or newer",
                hint="update the driver, or install a torch that was built for an older CUDA",
            )
    if gpus and compiler() is None:
        raise CannotHonour(
            "there is no C compiler, with which Triton builds its kernels' launchers",
            hint="apt-get install gcc, or name one in CC",
        )


def installed_cuda() -> int | None:
    """Return the major version of the CUDA that the installed torch brought; None without one."""
    for name in _RUNTIMES:
        try:
            return int(version(name).partition(".")[0])
        except PackageNotFoundError:
            continue
    return None


def compiler() -> str | None:
    """Return the C compiler that Triton would take."""
    return os.environ.get("CC") or next((path for name in _COMPILERS if (path := shutil.which(name))), None)
