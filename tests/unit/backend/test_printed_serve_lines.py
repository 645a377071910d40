"""Every printed `insitu serve` line for GPUs is planned on the devices that it names."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from insitu.backend.plan.devices.cluster import together
from insitu.backend.plan.devices.machine import Machine
from insitu.backend.plan.memory import GIB
from insitu.backend.plan.models import files
from insitu.cli import serve as command
from tests.support.known_models import CONFIGS

ROOT = Path(__file__).parents[3]
PAGES = (
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "deploy").glob("*.yaml")),
    ROOT / "README.md",
)
_REST = r"(?:\\\n|\n {16}--|[^\n`#>\\])*"
LINE = re.compile(f"insitu serve ({_REST}--model Qwen/{_REST})")
NODE = Machine(8, 80 * GIB, 1024 * GIB)
DEVICES = {
    "--ray-address auto": together([Machine(4, 80 * GIB, 512 * GIB)] * 2),  # kuberay.yaml: 2 nodes of 4
    "--ray-address 10.0.0.1:6379": together([NODE, NODE]),
    "--replicas 8": NODE,
    "7B": Machine(1, 80 * GIB, 128 * GIB),
}
ONE = Machine(1, 24 * GIB, 64 * GIB)


def printed_lines() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for found in LINE.findall(page.read_text()):
            yield page.relative_to(ROOT).as_posix(), " ".join(found.replace("\\\n", " ").split())


LINES = sorted(set(printed_lines()))


def test_lines_are_found() -> None:
    pages = {page for page, _ in LINES}
    assert {"deploy/kuberay.yaml", "deploy/sky.yaml", "docs/serve.md", "README.md"} <= pages
    assert len(LINES) >= 9


@pytest.mark.parametrize(("page", "line"), LINES)
def test_the_line_gets_a_plan(page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = next((found for named, found in DEVICES.items() if named in line), ONE)
    monkeypatch.setattr(command, "_gpus", lambda _: machine)
    monkeypatch.setattr(files, "_from_hub", lambda model, _: folder_of(model, tmp_path))
    monkeypatch.setenv("INSITU_API_KEY", "k" * 32)
    arguments = [*shlex.split(line), "--state-dir", str(tmp_path / "state")]
    with click.Context(command.serve):
        options = command.serve.make_context("serve", arguments).params
    settings, plan, _ = command._planned(command._settings(options), options)
    assert plan is not None
    assert plan.layout.used(settings.placement) <= machine.num_devices
    assert plan.layout.tensor_parallel_size <= machine.most_parallel


def folder_of(model: str, tmp_path: Path) -> Path:
    """Return a directory with the model's published configuration."""
    name = model.removeprefix("Qwen/").removesuffix("-Instruct").lower()
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return folder
