"""A small agent, its reward, its data and its configuration in a directory, ready for `insitu finetune`."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

AGENT = '''
"""An agent for tests: as many turns as the input asks for, over plain HTTP."""

import zlib

import aiohttp


async def answer(value, context):
    llm, messages = context.llm(), []
    headers = {"Authorization": f"Bearer {llm.api_key}"}
    turns = value.get("turns", 1) if isinstance(value, dict) else 1
    async with aiohttp.ClientSession(headers=headers) as http:
        for turn in range(turns):
            messages.append({"role": "user", "content": f"turn {turn} of {value}"})
            body = {"messages": messages, **llm.call_args()}
            async with http.post(f"{llm.base_url}/chat/completions", json=body) as got:
                got.raise_for_status()
                messages.append((await got.json())["choices"][0]["message"])
    return messages[-1]["content"]


def reward(item):
    """Different for every rollout, so that every group teaches something."""
    return zlib.crc32(item.rollout_id.encode()) / 2**32
'''

CONFIG: dict[str, Any] = {
    "llms": {"policy": {"_type": "openai", "model_name": "tiny", "api_key": "default", "temperature": 1.0}},
    "workflow": {"_type": "python", "entry": "small_agent:answer", "llm": "policy"},
    "eval": {
        "general": {"max_concurrency": 16, "dataset": {"_type": "json", "file_path": "train.json"}},
        "evaluators": {"reward": {"_type": "python", "entry": "small_agent:reward"}},
    },
    "trajectory_builders": {"groups": {"_type": "openpipe_art_traj_builder", "num_generations": 4}},
    "trainer_adapters": {
        "backend": {
            "_type": "openpipe_art_trainer_adapter",
            "backend": {"ip": "127.0.0.1", "port": 7623, "name": "small", "base_model": "tiny"},
        }
    },
    "trainers": {"epochs": {"_type": "openpipe_art_trainer"}},
    "finetuning": {
        "enabled": True,
        "trainer": "epochs",
        "trajectory_builder": "groups",
        "trainer_adapter": "backend",
        "reward_function": {"name": "reward"},
        "num_epochs": 2,
        "output_dir": "output",
    },
}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of `base` with `changes` laid over it."""
    result = copy.deepcopy(dict(base))
    for key, value in changes.items():
        known = result.get(key)
        result[key] = merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return result


class Project:
    """A user's directory: agent, data, configuration."""

    def __init__(self, path: Path, api_port: int, gateway_url: str, num_examples: int = 6) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        (path / "small_agent.py").write_text(AGENT)
        self.write_rows("train.json", num_examples)
        self.write_rows("validation.json", 4, start=1000)
        self._addresses = {
            "llms": {"policy": {"base_url": f"{gateway_url}/v1"}},
            "trainer_adapters": {"backend": {"backend": {"port": api_port}}},
        }
        self.configure()

    @property
    def output(self) -> Path:
        return self.path / "output"

    def write_rows(self, name: str, count: int, start: int = 0, **fields: Any) -> None:
        rows = [
            {"id": f"row-{i}", "question": f"question {i}", "answer": str(i), **fields}
            for i in range(start, start + count)
        ]
        (self.path / name).write_text(json.dumps(rows))

    def configure(self, **changes: Any) -> Path:
        """Write config.yml; `changes` are laid over the default one, section by section."""
        config = merged(merged(CONFIG, self._addresses), changes)
        file = self.path / "config.yml"
        file.write_text(yaml.safe_dump(config, sort_keys=False))
        return file

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "insitu.cli", "finetune", "--config_file=config.yml", *arguments]

    def run(self, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """`insitu finetune` as a user runs it, to its end."""
        return subprocess.run(
            self.command(*arguments),
            cwd=self.path,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=dict(os.environ),
        )

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The records of a JSON-lines file of the run directory."""
        return [json.loads(line) for line in (self.output / name).read_bytes().splitlines()]

    def json(self, name: str) -> Any:
        return json.loads((self.output / name).read_text())
