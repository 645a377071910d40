"""The demo's project as it is, through `insitu finetune` in a process of its own and a stand-in backend."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from insitu.demo.commands import Commands
from insitu.demo.demo import write_project
from tests.support.standin_backend import StandinBackend
from tests.support.standin_engine import Behaviour

ROWS = 4


@pytest.mark.timeout(120)
async def test_the_short_configuration_trains_and_validates(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    write_project(folder)
    for file in (folder / "data").iterdir():
        file.write_text(json.dumps(json.loads(file.read_text())[:ROWS]))
    async with StandinBackend(tmp_path / "state", Behaviour(texts=["10", "4", "Sure", "12"])) as backend:
        commands = Commands(tmp_path, folder, backend.port, backend.gateway_port)
        finetune = commands.finetune([("finetuning.num_epochs", "1")])
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "insitu.cli", *finetune, cwd=folder, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    before, *_ = json.loads((folder / "output" / "validation_history.json").read_text())
    assert (before["num_examples"], before["num_samples"], before["num_failed"]) == (ROWS, 4, 0)
    (step,) = [json.loads(line) for line in (folder / "output" / "steps.jsonl").read_text().splitlines()]
    assert step["num_trajectories"] == ROWS * 8
