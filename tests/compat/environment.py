"""Environments of the clients that are tried: one venv each, outside any checkout.

    python -m tests.compat.environment      # builds what is missing, and prints their interpreters

Their names are hashes of what goes into them. insitu's own code comes from the checkout, by PYTHONPATH.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from insitu.system.paths import cache_dir

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
UNUSED_SECONDS = 7 * 24 * 3600.0
QUIET = {"DO_NOT_TRACK": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "WANDB_MODE": "disabled"}
"""No package calls home."""


@dataclass(frozen=True)
class Environment:
    """What `requirements-NAME.txt` pins, all of it."""

    name: str
    plugin: Path | None = None
    """A package that is installed for its entry points; its code is the checkout's."""
    folder: Path = HERE
    """Where `requirements-NAME.txt` is."""
    target: str = "compat"
    """The target of the Makefile that builds it."""

    @property
    def requirements(self) -> Path:
        """Every package with its version: nothing is resolved."""
        return self.folder / f"requirements-{self.name}.txt"

    @property
    def directory(self) -> Path:
        """Where it is, or would be built."""
        content = self.requirements.read_bytes() + repr(sys.version_info[:3]).encode()
        if self.plugin is not None:
            content += (self.plugin / "pyproject.toml").read_bytes()
        return cache_dir() / "envs" / f"{self.name}-{hashlib.sha256(content).hexdigest()[:16]}"

    @property
    def ready(self) -> bool:
        """Whether it was built to the end."""
        return (self.directory / ".ready").exists()

    @property
    def why_not(self) -> str:
        """What to do when it is not."""
        return f"the environment of {self.requirements.name} is not built: run `make {self.target}`"

    def program(self, name: str = "python") -> str:
        """The path of one of its programs."""
        return str(self.directory / "bin" / name)

    def variables(self, home: Path) -> dict[str, str]:
        """The environment of its processes: this checkout, no telemetry, files of packages in `home`."""
        paths = [ROOT / "src", *([self.plugin] if self.plugin is not None else [])]
        own = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "HOME": str(home)}
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("OPENAI_", "INSITU_"))}
        return {**kept, **QUIET, **own, "INSITU_CACHE": str(cache_dir())}

    def build(self) -> float:
        """Build it unless it is there; the seconds that took. Two builds at once wait for each other."""
        place, began = self.directory, time.monotonic()
        place.parent.mkdir(parents=True, exist_ok=True)
        with (place.parent / f".lock-{self.name}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.ready:
                shutil.rmtree(place, ignore_errors=True)
                self._install(place)
            (place / ".ready").touch()
            self._remove_unused(place)
        return time.monotonic() - began

    def _install(self, place: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        pip = [self.program(), "-m", "pip"]
        install = [*pip, "install", "--quiet", "--no-deps"]
        subprocess.run([*install, "--no-compile", "--requirement", str(self.requirements)], check=True)
        if self.plugin is not None:
            subprocess.run([*install, "--no-build-isolation", "--editable", str(self.plugin)], check=True)

    def _remove_unused(self, used: Path) -> None:
        for other in used.parent.glob(f"{self.name}-*"):
            ready = other / ".ready"
            if other != used and ready.exists() and time.time() - ready.stat().st_mtime > UNUSED_SECONDS:
                shutil.rmtree(other, ignore_errors=True)


NAT = Environment("nat", HERE / "nat_addition")
"""The NeMo Agent Toolkit 1.9.0 with openpipe-art 0.5.17."""
ART = Environment("art")
"""openpipe-art 0.5.18 and what insitu needs."""


if __name__ == "__main__":
    for environment in (NAT, ART):
        seconds = environment.build()
        print(f"{environment.program()} ({seconds:.0f} s)")
