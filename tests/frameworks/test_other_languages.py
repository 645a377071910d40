"""Agents in Node.js and in the shell, as `examples/other_languages` has them: recorded and trained."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from insitu.gateway_client import GatewayClient
from insitu.system.paths import cache_dir
from insitu.types import StepSettings
from insitu.wire.listed_calls import expand
from insitu.workflow.kinds.command import CommandConfig, CommandWorkflow
from tests.frameworks.checks import check_step, group_of, open_run, run_workflow
from tests.support.backend import Backend
from tests.support.standin_backend import StandinBackend
from tests.support.standin_engine import Behaviour
from tests.support.standin_tools import StandinToolEngine

EXAMPLE = Path(__file__).parents[2] / "examples" / "other_languages"
COMMANDS = {
    "openai": ["node", "openai_agent.mjs"],
    "ai_sdk": ["node", "ai_sdk_agent.mjs"],
    "shell": ["./agent.sh"],
}
NUM_EXAMPLES, NUM_GENERATIONS = 4, 2
MISSING = [name for name in ("node", "npm", "curl", "jq") if shutil.which(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


@pytest.fixture(scope="module")
def node_modules() -> Path:
    """What `npm ci` brings, outside the checkout, under the hash of the lock file."""
    lock = (EXAMPLE / "package-lock.json").read_bytes()
    place = cache_dir() / "envs" / f"node-{hashlib.sha256(lock).hexdigest()[:16]}"
    place.parent.mkdir(parents=True, exist_ok=True)
    # Two lanes may ask at once: the second waits for what the first installs.
    with place.with_suffix(".lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if not (place / ".ready").exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            for name in ("package.json", "package-lock.json"):
                shutil.copy(EXAMPLE / name, place)
            subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=place, check=True, timeout=300)
            (place / ".ready").touch()
    return place / "node_modules"


@pytest.fixture
def project(tmp_path: Path, node_modules: Path) -> Path:
    """The example as a user has it after `npm ci`."""
    copied = shutil.copytree(EXAMPLE, tmp_path / "project", ignore=shutil.ignore_patterns("node_modules"))
    (copied / "node_modules").symlink_to(node_modules)
    return copied


_answers = itertools.count()


def seller(messages: list[dict[str, str]]) -> str:
    """Looks up a price when it may, then answers, at times with more words than at others."""
    if messages[0]["role"] == "developer" and messages[-1]["role"] != "tool":
        return '<call>{"name": "price", "arguments": {"item": "pear"}}</call>'
    return "It costs 4" + "!" * (next(_answers) % 17)


async def finetune(project: Path, name: str, backend: StandinBackend) -> str:
    """`insitu finetune` with the example's own configuration; only names and addresses are changed."""
    changes = {
        "workflow.command": json.dumps(COMMANDS[name]),
        "llms.policy.model_name": "tiny",
        "llms.policy.base_url": f"{backend.gateway_url}/v1",
        "trainer_adapters.backend.backend.port": str(backend.port),
        "trainer_adapters.backend.backend.base_model": "tiny",
        "trainer_adapters.backend.backend.name": name,
        "trajectory_builders.groups.num_generations": str(NUM_GENERATIONS),
        "finetuning.num_epochs": "1",
        "finetuning.output_dir": f"output-{name}",
    }
    overrides = [word for path, value in changes.items() for word in ("-o", path, value)]
    command = [sys.executable, "-m", "insitu.cli", "finetune", "--config_file=config.yml", *overrides]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, cwd=project, stdout=pipe, stderr=asyncio.subprocess.STDOUT, env=dict(os.environ)
    )
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, out.decode()
    return out.decode()


@pytest.mark.timeout(180)
async def test_the_example_trains_in_every_language(project: Path, tmp_path: Path) -> None:
    backend = StandinBackend(tmp_path / "state")
    backend.engine = StandinToolEngine(Behaviour(answers=seller))
    async with backend, backend.gateway_client() as gateway, backend.client() as client:
        await asyncio.gather(*[finetune(project, name, backend) for name in COMMANDS])
        for name in COMMANDS:
            (step,) = await client.steps(name)
            assert step.metrics["account/calls_trained"] > 0, name
            for rollout in rollouts_of(project / f"output-{name}"):
                await check_conversation(name, gateway, rollout)


def rollouts_of(output: Path) -> list[str]:
    ids = {
        json.loads(line)["rollout_id"]
        for path in output.glob("**/*.jsonl")
        for line in path.read_bytes().splitlines()
        if b'"rollout_id"' in line
    }
    assert len(ids) == NUM_EXAMPLES * NUM_GENERATIONS, output
    return sorted(ids)


async def check_conversation(name: str, gateway: GatewayClient, rollout_id: str) -> None:
    """Both turns are recorded, and the second one holds what came of the first."""
    record = await gateway.rollout_record(rollout_id)
    calls: list[dict[str, Any]] = expand(record.calls)
    assert (record.seen, len(calls), record.unrecorded) == (2, 2, {}), name
    messages = calls[1]["messages"]
    roles = [message["role"] for message in messages]
    if name == "shell":
        assert roles == ["system", "user", "assistant", "user"]
        assert messages[2]["content"] == calls[0]["answer"]["content"]
        return
    assert roles == ["system", "user", "assistant", "tool"], name
    (made,), (sent,) = calls[0]["answer"]["tool_calls"], messages[2]["tool_calls"]
    assert (sent["id"], sent["function"]["name"]) == (made["id"], "price"), name
    assert messages[3]["tool_call_id"] == sent["id"]
    assert messages[3]["content"] == "4", "the price of a pear"


@pytest.mark.sweep
@pytest.mark.timeout(400)
async def test_one_step_trains_on_all_languages(project: Path, real_backend: Backend) -> None:
    """With real tokens of a real engine; what a random model says is no tool call."""
    gateway_url = real_backend.gateway_url

    async def group(name: str) -> Any:
        config = {"_type": "command", "command": COMMANDS[name], "cwd": str(project)}
        workflow = CommandWorkflow(CommandConfig.model_validate(config), None)  # type: ignore[arg-type]
        rollouts = await run_workflow(name, workflow, gateway_url, "languages", {})
        return group_of(name, rollouts, "languages", None)

    async with real_backend.client() as client, open_run(client, "languages"):
        groups = await asyncio.gather(*[group(name) for name in COMMANDS])
        await check_step(client, "languages", groups, StepSettings(mask_truncated=False))
