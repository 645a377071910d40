"""The project of `insitu init` as it is, through `insitu try` and a stand-in backend."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from insitu.scaffold.project import Project
from tests.support.standin_backend import StandinBackend
from tests.support.standin_engine import Behaviour


@pytest.mark.timeout(120)
async def test_the_agent_is_tried_on_two_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Project("shop", "openai").write()
    behaviour = Behaviour(models=["smollm2"], texts=["10"])
    async with StandinBackend(tmp_path / "state", behaviour) as backend:
        addresses = [
            "-o",
            "model.base_url",
            f"{backend.gateway_url}/v1",
            "-o",
            "backend.port",
            str(backend.port),
        ]
        command = ["try", "config.yml", "--json", *addresses]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "insitu.cli", *command, cwd=tmp_path / "shop", stdout=pipe, stderr=pipe
        )
        out, said = await process.communicate()
    assert process.returncode == 0, said.decode()
    found = json.loads(out)
    assert (found["ok"], found["recorded"], found["model"]) == (True, True, "smollm2")
    first, second = found["examples"]
    assert (first["id"], first["output"], first["expected"], first["reward"]) == ("train-01", "10", "10", 1.0)
    assert (second["reward"], second["expected"]) == (0.3, "11")
    assert [each["reward_check"]["told_apart"] for each in found["examples"]] == [True, True]
    assert all(each["num_calls"] == 1 and each["num_output_tokens"] > 0 for each in found["examples"])
