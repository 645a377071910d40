"""Packages built for CUDA beside a torch for CPUs are hidden, here and in every child; others stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HIDE = "from insitu.system.torch_builds.mismatched import hide_mismatched; print(*hide_mismatched())"
LOOK = (
    "from importlib.util import find_spec; "
    "print(*(find_spec(name) is not None for name in ('torchvision', 'torchaudio', 'torchcodec')))"
)
CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}], check=True)"
GRANDCHILD = CHILD.format(CHILD.format(LOOK))


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Return a folder with packages that have nothing but a version."""

    def add(name: str, version: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "version.py").write_text(f"__version__ = '{version}'\n")

    add("torch", "2.13.0+cpu")
    add("torchvision", "0.29.2+cu132")
    add("torchaudio", "2.11.0+cpu")
    add("torchcodec", "0.17.0")
    return tmp_path


def run(packages: Path, *code: str) -> list[str]:
    source = Path(__file__).parents[2] / "src"
    environment = os.environ | {"PYTHONPATH": f"{packages}{os.pathsep}{source}"}
    command = [sys.executable, "-c", "\n".join(["import sys", *code])]
    # Python's own output comes after that of its children unless it is flushed.
    said = subprocess.run(
        command, env=environment | {"PYTHONUNBUFFERED": "1"}, capture_output=True, timeout=60
    )
    assert said.returncode == 0, said.stderr.decode()
    return said.stdout.decode().split("\n")[:-1]


def test_a_cuda_build_is_hidden_here_and_in_every_child(packages: Path) -> None:
    assert run(packages, HIDE, LOOK, GRANDCHILD) == ["torchvision", "False True True", "False True True"]


def test_the_environments_own_start_still_runs_in_a_child(packages: Path) -> None:
    (packages / "sitecustomize.py").write_text("print('own start')\n")
    assert run(packages, HIDE, CHILD.format("print('child')"))[-2:] == ["own start", "child"]


@pytest.mark.parametrize("version", ["2.13.0+cu130", "2.13.0"])
def test_nothing_is_hidden_beside_another_torch(packages: Path, version: str) -> None:
    (packages / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
    assert run(packages, HIDE, LOOK) == ["", "True True True"]
