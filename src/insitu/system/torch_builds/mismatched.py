"""Hide packages that were built for CUDA from processes whose torch was built for CPUs.

vLLM for CPUs asks for torchvision, torchaudio and torchcodec, and an index may hold their CUDA builds alone.
Transformers takes an installed torchvision for a working one and fails on it. Text models need none of them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
HIDDEN = "INSITU_HIDDEN_PACKAGES"
"""Names that `path/sitecustomize.py` hides in a child, with commas."""
_PATH = str(Path(__file__).parent / "path")
_BUILD = re.compile(r"^__version__ = '[^'+]+\+(\w+)'", re.MULTILINE)


def hide_mismatched() -> list[str]:
    """Hide them in this process and in every Python process that it starts; return their names."""
    names = list(mismatched())
    for name in names:
        sys.modules[name] = None  # type: ignore[assignment]  # `find_spec` and `import` then miss it
    if names:
        os.environ[HIDDEN] = ",".join(names)
        before = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
        os.environ["PYTHONPATH"] = os.pathsep.join([_PATH, *(part for part in before if part != _PATH)])
    return names


def mismatched() -> Iterator[str]:
    """Yield the packages of another build than torch's; those that were imported already are left alone."""
    if _build("torch") != "cpu":
        return
    for name in COMPANIONS:
        if name not in sys.modules and (_build(name) or "cpu") != "cpu":
            yield name


def _build(name: str) -> str | None:
    """Return the build in a package's version, such as `cpu` or `cu130`, without importing it."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    found = _BUILD.search(text)
    return found[1] if found else None
