"""Fault 18 of the original harness: keys in dumped files, unknown settings that are ignored."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from insitu.config.load import load_config
from insitu.errors import InvalidRequest
from tests.support.finetune_bench import FinetuneBench, open_bench

CANARIES = [f"canary-{name}-5f3b" for name in "abcdefghijklmnopqrst"]
KEY = CANARIES[0]
"""The key of gateway and backend: a run uses it in every request."""

AGENT = """
import os
import zlib

import aiohttp


async def answer(value, context):
    llm = context.llm()
    headers = {"Authorization": f"Bearer {llm.api_key}"}
    body = {"messages": [{"role": "user", "content": str(value)}], **llm.call_args()}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(f"{llm.base_url}/chat/completions", json=body) as got:
            got.raise_for_status()
            text = (await got.json())["choices"][0]["message"]["content"]
    if context.rollout_id.split(".")[3] == "3":
        # As clients do that put the request into their message.
        raise PermissionError(f"401 for {headers} and {context.llm('judge').api_key}")
    return text


def reward(item):
    if item.rollout_id.split(".")[3] == "2":
        raise ValueError("the judge does not take " + os.environ["JUDGE_KEY"])
    return zlib.crc32(item.rollout_id.encode()) / 2**32
"""


def secrets(gateway_url: str) -> dict[str, Any]:
    """Every place of a configuration that may hold a secret."""
    model = {"_type": "openai", "model_name": "other", "base_url": "http://127.0.0.1:9/v1"}
    headers = {"Authorization": f"Bearer {CANARIES[4]}", "X-Custom": CANARIES[5], "Cookie": CANARIES[6]}
    return {
        "llms": {
            "policy": {"api_key": KEY, "base_url": f"{gateway_url}/v1"},
            "judge": {**model, "api_key": "${JUDGE_KEY}"},
            "coach": {
                **model,
                "api_key": CANARIES[2],
                "extra_headers": {"api-key": CANARIES[3], "x-token": CANARIES[12]},
            },
        },
        "functions": {
            "remote": {"_type": "http", "url": "http://127.0.0.1:9/x", "headers": headers},
            "tool": {
                "_type": "command",
                "command": ["true"],
                "env": {f"PLAIN_{i}": CANARIES[i] for i in range(7, 12)},
            },
            "args": {
                "_type": "python",
                "entry": "small_agent:answer",
                "llm": "policy",
            },
        },
        "workflow": {"args": {}},
        "trainer_adapters": {
            "backend": {"backend": {"api_key": KEY, "engine_args": {}}},
        },
        "finetuning": {"num_epochs": 1},
    }


def found_in(text: str) -> list[str]:
    return [canary for canary in CANARIES if canary in text]


def found_in_files(directory: Path) -> dict[str, list[str]]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert files
    found = {str(path): found_in(path.read_bytes().decode("utf-8", "replace")) for path in files}
    return {name: canaries for name, canaries in found.items() if canaries}


async def run_with_secrets(bench: FinetuneBench, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(bench.project.run, *arguments)


@pytest.fixture
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.standin_backend.KEY", KEY)
    monkeypatch.setenv("JUDGE_KEY", CANARIES[1])


@pytest.mark.usefixtures("_keys")
async def test_fault_18_secrets_are_written_nowhere(tmp_path, monkeypatch):
    """In the original keys are plain strings that land in dumped configurations."""
    async with open_bench(tmp_path, monkeypatch) as bench:
        (bench.project.path / "small_agent.py").write_text(AGENT)
        bench.project.configure(**secrets(bench.backend.gateway_url))
        planned = await run_with_secrets(bench, "--dry-run", "--show-config")
        assert planned.returncode == 0, planned.stdout + planned.stderr
        assert found_in(planned.stdout + planned.stderr) == []
        assert "**********" in planned.stdout
        ended = await run_with_secrets(bench, "-o", "llms.coach.api_key", CANARIES[13])
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert found_in(ended.stdout + ended.stderr) == []
        assert found_in_files(bench.project.output) == {}
        # The reasons are there, without what they would have given away.
        reasons = {record["generation"]: record["reason"] for record in bench.records()}
        assert reasons[3].startswith("PermissionError: 401 for {'Authorization': 'Bearer **********'}")
        assert reasons[2].endswith("the judge does not take **********")


@pytest.mark.usefixtures("_keys")
async def test_fault_18_a_failed_run_tells_no_secrets(tmp_path, monkeypatch):
    """The command that goes on is printed, but not the key that was given with it."""
    async with open_bench(tmp_path, monkeypatch) as bench:
        (bench.project.path / "small_agent.py").write_text(AGENT)
        bench.project.configure(**secrets(bench.backend.gateway_url))
        bench.backend.fail_next_job = "out of memory"
        given = ["-o", "llms.coach.api_key", CANARIES[13], "--override", "functions.remote.headers.X-Custom"]
        ended = await run_with_secrets(bench, *given, CANARIES[14], "-o", "finetuning.seed", "4711")
        assert ended.returncode == 1
        assert "out of memory" in ended.stdout
        assert "-o finetuning.seed 4711" in ended.stdout
        assert found_in(ended.stdout + ended.stderr) == []
        assert found_in_files(bench.project.output) == {}


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("llms.policy.api_key", {"llms": {"policy": {"api_key": {"value": CANARIES[15]}}}}),
    ("llms.policy.api_key", {"llms": {"policy": {"api_key": [CANARIES[15]]}}}),
    (
        "functions.remote",
        {"functions": {"remote": {"_type": "http", "url": "http://h/x", "headers": CANARIES[16]}}},
    ),
    (
        "functions.remote",
        {"functions": {"remote": {"_type": "http", "url": "http://h/x", "headers": {"X": [CANARIES[16]]}}}},
    ),
    (
        "functions.tool",
        {"functions": {"tool": {"_type": "command", "command": ["true"], "env": {"X": [CANARIES[17]]}}}},
    ),
    (
        "functions.tool",
        {"functions": {"tool": {"_type": "command", "command": ["true"], "env": CANARIES[17]}}},
    ),
    ("api_key", {"trainer_adapters": {"backend": {"backend": {"api_key": {"x": CANARIES[18]}}}}}),
    ("api_kee", {"trainer_adapters": {"backend": {"backend": {"api_kee": CANARIES[19]}}}}),
]


@pytest.mark.parametrize(("place", "changes"), WRONG, ids=range(len(WRONG)))
def test_fault_18_errors_show_no_secrets(tmp_path, place, changes):
    """What is wrong is named by its place, never by a value that may be a secret."""
    from tests.support.finetuning import Project

    file = Project(tmp_path, 7623, "http://127.0.0.1:8000").configure(**changes)
    with pytest.raises(InvalidRequest) as caught:
        load_config(file)
    assert place in str(caught.value)
    assert found_in(str(caught.value)) == []


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"finetuning": {"num_epoch": 3}}, "num_epochs"),
        ({"finetunning": {}}, "finetuning"),
        ({"finetuning": {"curriculum_learning": {"min_reward_dif": 0.1}}}, "min_reward_diff"),
        ({"trajectory_builders": {"groups": {"num_generation": 3}}}, "num_generations"),
        ({"trainer_adapters": {"backend": {"training": {"learning_rat": 0.1}}}}, "learning_rate"),
        ({"trainers": {"epochs": {"anything": 1}}}, "anything"),
        ({"workflow": {"entri": "a:b"}}, "entry"),
        ({"eval": {"evaluators": {"reward": {"entri": "a:b"}}}}, "entry"),
    ],
)
def test_fault_18_unknown_settings_are_refused_with_the_nearest(tmp_path, changes, wanted):
    """The original ignores what it does not know: a typing error trains with the default."""
    from tests.support.finetuning import Project

    file = Project(tmp_path, 7623, "http://127.0.0.1:8000").configure(**changes)
    with pytest.raises(InvalidRequest) as caught:
        load_config(file)
    assert wanted in str(caught.value)


def test_fault_18_an_unknown_option_is_refused(tmp_path):
    """Also on the command line."""
    command = [sys.executable, "-m", "insitu.cli", "finetune", "--config_file=x.yml", "--num_epocs=3"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=30, check=False)
    assert ended.returncode == 2
    assert "--num_epocs" in ended.stderr
