"""Projects of `insitu init` on a real backend: tried as they are, and trained, for every framework."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.scaffold.framework import FRAMEWORKS
from tests.frameworks.new_project import NewProject
from tests.support.backend import Backend


def new_project(framework: str, folder: Path, backend: Backend) -> NewProject:
    if missing := FRAMEWORKS[framework].missing():
        pytest.skip(f"not installed here: {', '.join(missing)}; tests/frameworks/second_matrix.py tries it")
    project = NewProject(folder, framework, backend.api_url, backend.gateway_url)
    project.init()
    return project


@pytest.mark.timeout(500)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_new_project_is_tried(framework: str, tmp_path: Path, real_backend: Backend) -> None:
    new_project(framework, tmp_path, real_backend).check_try()


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "framework",
    ["openai", *[pytest.param(name, marks=pytest.mark.sweep) for name in FRAMEWORKS if name != "openai"]],
)
async def test_a_new_project_is_trained(framework: str, tmp_path: Path, real_backend: Backend) -> None:
    await new_project(framework, tmp_path, real_backend).check_finetune()
