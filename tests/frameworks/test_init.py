"""Projects of `insitu init` on a real backend: tried as they are for every framework, and one is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.scaffold.framework import FRAMEWORKS
from tests.frameworks.new_project import RUN, NewProject
from tests.support.backend import Backend

REWARD = '''
"""Different for most answers: a random model never gives a total."""


def reward(item):
    return (sum(map(ord, item.output)) % 101) / 100
'''


@pytest.mark.timeout(500)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_new_project_is_tried(framework: str, tmp_path: Path, real_backend: Backend) -> None:
    if missing := FRAMEWORKS[framework].missing():
        pytest.skip(f"not installed here: {', '.join(missing)}; tests/frameworks/second_matrix.py tries it")
    project = NewProject(tmp_path, framework, real_backend.api_url, real_backend.gateway_url)
    project.init()
    project.check_try()


@pytest.mark.timeout(500)
async def test_a_new_project_is_trained(tmp_path: Path, real_backend: Backend) -> None:
    project = NewProject(tmp_path, "openai", real_backend.api_url, real_backend.gateway_url)
    project.init()
    (project.path / "reward.py").write_text(REWARD)
    for file in (project.path / "data").iterdir():
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:2]))
    async with real_backend.client() as client:
        try:
            # A random model ends no answer by itself.
            project.run(
                "finetune",
                "--config_file=config.yml",
                finetuning__num_epochs="1",
                num_generations="4",
                training__mask_truncated="false",
            )
            (step,) = await client.steps(RUN)
        finally:
            await client.close_run(RUN)
    assert step.metrics["account/calls_trained"] == 8
    assert (project.path / "output" / RUN / "validation_history.json").exists()
