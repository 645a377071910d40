"""A stand-in for torchvision, whose wheels on PyPI need torch's build for CUDA.

vLLM's and Transformers' classes of models with images import names from it. No image is ever read here, so
nothing behind a name is called.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.28.0"


class Named:
    """Something that can be named, also in a type, and never called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Named()

    def __hash__(self) -> int:
        return id(self)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Named()
