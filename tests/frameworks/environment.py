"""The second environment: frameworks that cannot live beside the first seven, in a venv outside any checkout.

    python -m tests.frameworks.environment      # builds it when it is missing, and prints its Python

Its name is the hash of what goes into it. insitu's own code comes from the checkout, by PYTHONPATH.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from insitu.system.paths import cache_dir

ROOT = Path(__file__).parents[2]
PINS = ROOT / "constraints-frameworks.txt"
UNUSED_SECONDS = 7 * 24 * 3600.0
QUIET = {
    "ANONYMIZED_TELEMETRY": "False",  # chromadb
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_TRACKING": "true",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OTEL_SDK_DISABLED": "true",
}
"""No package calls home."""


def directory() -> Path:
    """Where it is, or would be built."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    parts = [project["dependencies"], project["entry-points"], sys.version_info[:3]]
    content = PINS.read_bytes() + json.dumps(parts).encode()
    return cache_dir() / "envs" / f"frameworks-{hashlib.sha256(content).hexdigest()[:16]}"


def python() -> Path | None:
    """Its interpreter, if it was built to the end."""
    place = directory()
    return place / "bin" / "python" if (place / ".ready").exists() else None


def variables(home: Path) -> dict[str, str]:
    """The environment of its processes: this checkout's code, no telemetry, files of packages in `home`."""
    own = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "HOME": str(home)}
    places = {"CREWAI_STORAGE_DIR": str(home / "crewai"), "DSPY_CACHEDIR": str(home / "dspy")}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("OPENAI_", "INSITU_"))}
    return {**kept, **QUIET, **own, **places, "INSITU_CACHE": str(cache_dir())}


def build() -> Path:
    """Build it unless it is there; two builds at once wait for each other."""
    place = directory()
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / ".ready").exists():
            shutil.rmtree(place, ignore_errors=True)
            _install(place)
        (place / ".ready").touch()
        _remove_unused(place)
    return place / "bin" / "python"


def _install(place: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    pip = [str(place / "bin" / "python"), "-m", "pip"]
    subprocess.run(
        [*pip, "install", "--quiet", "--no-compile", "--no-deps", "--requirement", str(PINS)], check=True
    )
    # For its entry points: the code that runs is the checkout's own.
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--editable", str(ROOT)], check=True)
    subprocess.run([*pip, "check"], check=True)


def _remove_unused(used: Path) -> None:
    for other in used.parent.glob("frameworks-*"):
        ready = other / ".ready"
        if other != used and ready.exists() and time.time() - ready.stat().st_mtime > UNUSED_SECONDS:
            shutil.rmtree(other, ignore_errors=True)


if __name__ == "__main__":
    print(build())
