"""docs/plugins.md as it stands is a package of a third party: discovered, and true to the contracts."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from insitu.testing.standin_gateway import StandinGateway

PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def install(directory: Path, module: str, points: Mapping[str, str], source: str) -> None:
    """What pip leaves behind: a module and the metadata that names its entry points."""
    directory.mkdir(exist_ok=True)
    (directory / f"{module}.py").write_text(source)
    metadata = directory / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[insitu.components]", *lines, ""]))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with the page's configuration and tests; its package is installed in `site`."""
    (points,) = blocks("toml")
    (config,) = blocks("yaml")
    code = {"acme_agents.py": "", "test_acme.py": ""}
    for block in blocks("python"):
        name, _, rest = block.partition("\n")
        code[name.removeprefix("# ")] += rest
    group = tomllib.loads(points)["project"]["entry-points"]["insitu.components"]
    install(tmp_path / "site", "acme_agents", group, code["acme_agents.py"])
    project = tmp_path / "project"
    project.mkdir()
    (project / "config.yml").write_text(config)
    (project / "test_acme.py").write_text(code["test_acme.py"])
    return project


def environment(project: Path, **more: str) -> dict[str, str]:
    paths = [str(project.parent / "site"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


async def dry_run(project: Path, **more: str) -> tuple[int | None, str]:
    command = [sys.executable, "-m", "insitu.cli", "finetune", "--config_file=config.yml"]
    command += ["--dry-run", "--show-config"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, cwd=project, env=environment(project, **more), stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, out.decode()


def say_nothing(rollout_id: str | None, body: Mapping[str, Any]) -> str:
    return ""


async def test_a_package_is_discovered_by_its_entry_point(project: Path) -> None:
    async with StandinGateway(say_nothing, "acme-run") as gateway:
        code, said = await dry_run(project, GATEWAY=gateway.url)
    assert code == 0, said
    for kind in ("answer", "concise", "shortest", "sums", "builder", "cluster", "reporting"):
        assert f"_type: acme_{kind}" in said
    assert "ok      components: built" in said
    assert f"8 examples; llms.policy is trained as 'acme-run' at {gateway.url}" in said
    assert "ok      backend: healthy; run 'acme-run' of 'acme-base'" in said
    assert "ok      gateway: serves acme-run" in said
    assert "1 epochs of 8 examples × 4 rollouts" in said
    assert (project / "report.txt").exists(), "the async generator of the trainer has run"


async def test_without_the_package_its_types_are_unknown(project: Path) -> None:
    (project.parent / "site" / "acme_agents-1.0.dist-info" / "entry_points.txt").unlink()
    code, said = await dry_run(project)
    assert code == 1
    assert "no dataset has the _type `acme_sums`" in said
    assert "Traceback" not in said


async def test_a_package_that_cannot_be_imported_is_named(project: Path) -> None:
    install(project.parent / "site", "acme_broken", {"broken": "acme_broken"}, "import acme_missing\n")
    code, said = await dry_run(project)
    assert code == 1
    assert "the components of package acme_broken cannot be imported" in said
    assert "acme_missing" in said
    assert "Traceback" not in said


async def test_an_unknown_key_of_a_plugin_is_refused(project: Path) -> None:
    config = project / "config.yml"
    config.write_text(config.read_text().replace("count: 8", "cout: 8"))
    code, said = await dry_run(project)
    assert code == 1
    assert "eval.general.dataset.cout" in said
    assert "count" in said


def test_the_package_keeps_the_contracts(project: Path) -> None:
    # One test of the trainer is enough to see that its suite is set up; the others draw many plots.
    chosen = ["-k", "not TestTrainer or a_failed_job_stops_the_loop", "test_acme.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp=temp", *chosen],
        cwd=project,
        env=environment(project),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d\d passed", done.stdout, re.MULTILINE), done.stdout
