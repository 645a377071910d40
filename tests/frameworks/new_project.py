"""A project of `insitu init`, run as its user would, against a backend that serves `tiny`.

Nothing here imports vLLM or torch, as in `checks.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from insitu.cli import cli
from insitu.client import InsituClient

RUN = "shop"
REWARD = '''
"""Different for most answers: a random model never gives a total."""


def reward(item):
    return (sum(map(ord, item.output)) % 101) / 100
'''


@dataclass(frozen=True)
class NewProject:
    """A project beside others in `place`, and the addresses of its backend."""

    place: Path
    framework: str
    api_url: str
    gateway_url: str

    @property
    def path(self) -> Path:
        return self.place / RUN

    def init(self) -> None:
        with contextlib.chdir(self.place):
            done = CliRunner().invoke(cli, ["init", RUN, "--framework", self.framework, "--json"])
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert (found["directory"], found["install"]) == (str(self.path), None)

    def run(self, *command: str, **changes: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the project's directory; `changes` override settings, with `__` for a dot."""
        own = {
            "model.model_name": "tiny",
            "model.base_url": f"{self.gateway_url}/v1",
            "backend.port": self.api_url.rpartition(":")[2],
        }
        settings = own | {key.replace("__", "."): value for key, value in changes.items()}
        overrides = [word for path, value in settings.items() for word in ("-o", path, value)]
        words = [sys.executable, "-m", "insitu.cli", *command, *overrides]
        # With a key of OpenAI in the environment its Agents SDK would send traces away.
        env = {key: value for key, value in os.environ.items() if not key.startswith("OPENAI_")}
        # The test's own limit of time ends it.
        done = subprocess.run(words, cwd=self.path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
        return done

    def check_try(self) -> None:
        """Two rollouts, each with one recorded call and its tokens."""
        found: dict[str, Any] = json.loads(self.run("try", "config.yml", "--limit", "2", "--json").stdout)
        assert (found["ok"], found["model"], found["recorded"]) == (True, "tiny", True)
        assert [each["id"] for each in found["examples"]] == ["train-01", "train-02"]
        for example in found["examples"]:
            assert example["num_calls"] == 1, example
            assert 0 < example["num_output_tokens"] <= 12, "max_tokens of config.yml"
            assert isinstance(example["output"], str)

    async def check_finetune(self, key: str = "default") -> None:
        """One step on two examples; the run is closed afterwards, so that another can follow."""
        (self.path / "reward.py").write_text(REWARD)
        for file in (self.path / "data").iterdir():
            file.write_text("".join(file.read_text().splitlines(keepends=True)[:2]))
        async with InsituClient(self.api_url, key) as client:
            try:
                # A random model ends no answer by itself.
                self.run(
                    "finetune",
                    "--config_file=config.yml",
                    finetuning__num_epochs="1",
                    num_generations="4",
                    training__mask_truncated="false",
                )
                (step,) = await client.steps(RUN)
            finally:
                await client.close_run(RUN)
                await client.delete_run(RUN)
        assert step.metrics["account/calls_trained"] == 8
        assert (self.path / "output" / RUN / "validation_history.json").exists()
