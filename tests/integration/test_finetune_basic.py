"""The basic configuration of the original harness trains here, with only names and addresses changed."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from insitu.client import InsituClient
from insitu.gateway_client import GatewayClient
from insitu.harness.files.rollout_store import RolloutStore
from insitu.harness.files.trained_tokens import read_tokens, tokens_file
from insitu.testing.models import tiny
from tests.support.addition import Rollouts
from tests.support.backend import Backend, running_backend
from tests.support.exactness import EXACT
from tests.support.original_documents import original_documents

MOST_APART = 5 * EXACT
"""Of trainer and sampler, in a token's log-probability: the engine's noise at a temperature of 0.4. A random
model is off by 1 and more after a wrong token."""
COMPONENTS = '''
"""What the user of the basic configuration brings: a workflow and an evaluator, found by entry point."""

import aiohttp

from insitu import EvalItem, WorkflowContext, register_evaluator, register_workflow


@register_workflow("my_workflow")
async def my_workflow(question: str, context: WorkflowContext) -> str:
    llm = context.llm()
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 64, **llm.call_args()}
    body["stop"] = ["a", "e", "i"]  # a random model ends no answer by itself, and cut ones are not trained on
    headers = {"Authorization": f"Bearer {llm.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(f"{llm.base_url}/chat/completions", json=body) as answer:
            answer.raise_for_status()
            return (await answer.json())["choices"][0]["message"]["content"] or ""


@register_evaluator("my_custom_evaluator")
def my_custom_evaluator(item: EvalItem) -> float:
    return (sum(map(ord, item.output)) % 101) / 100
'''


def basic_configuration() -> str:
    """The first complete YAML block of the documents."""
    texts = original_documents()
    blocks = [block for text in texts for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    return next(block for block in blocks if "finetuning:" in block and "llms:" in block)


def with_names_and_addresses(text: str, backend: Backend) -> str:
    text = text.replace("Qwen/Qwen2.5-3B-Instruct", "tiny")
    text = text.replace("http://localhost:8000/v1", f"{backend.gateway_url}/v1")
    return text.replace("port: 7623", f"port: {backend.api_url.rpartition(':')[2]}")


def install_components(site: Path) -> None:
    """A distribution as pip leaves it: a module and its metadata."""
    (site / "my_components.py").write_text(COMPONENTS)
    metadata = site / "my_components-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-components\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[insitu.components]\nmine = my_components\n")


async def base_model_is_back_without_a_restart(backend: Backend, client: InsituClient) -> None:
    """A closed run leaves its engine, with the base model's own weights, to the next one."""
    before = backend.engine().pid
    await client.close_run("my_training_run")
    await client.register_run("next", "tiny")
    await client.wait_run_ready("next", 400)
    async with aiohttp.ClientSession() as http:
        rollouts = Rollouts(http, backend.gateway_url, "next", attempts=5)
        await rollouts.chat("r", [{"role": "user", "content": "hello"}], model="tiny")
        async with GatewayClient(backend.gateway_url, "default") as gateway:
            (call,) = await gateway.rollout_calls("r")
    assert call["policy_version"] == "base"
    assert backend.engine().pid == before


def check_tokens(output: Path, lines: list[dict[str, Any]]) -> None:
    """Every trained token has the trainer's log-probability, which is the sampler's, and its advantage."""
    num_tokens = 0
    for line in lines:
        if not line["step"]:
            continue
        file = tokens_file(output, line["step"])
        trained = read_tokens(file.read_bytes(), str(file))
        with RolloutStore(output / "trajectories" / f"epoch-{line['epoch']:04d}.jsonl") as store:
            calls = {
                call["id"]: (rollout, call)
                for rollout in store.rollouts()
                for call in rollout.details(tokens=True).calls
            }
        assert trained, f"step {line['step']} trained on something"
        signs: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for call_id, figures in trained.items():
            rollout, call = calls[call_id]
            assert figures.logprobs.tolist() == pytest.approx(call.get("logprobs"), abs=MOST_APART)
            assert rollout.reward is not None
            signs[rollout.example_id].append((rollout.reward, figures.advantage))
            num_tokens += len(figures.logprobs)
        for group in signs.values():
            assert [pair[1] for pair in sorted(group)] == sorted(pair[1] for pair in group), "better is more"
    assert num_tokens == sum(line["training"]["num_tokens"] for line in lines if line["step"])


@pytest.mark.timeout(600)
async def test_basic_configuration_trains_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install_components(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    (tmp_path / "data").mkdir()
    rows = [{"id": i, "question": f"Say something about {i}.", "answer": "x"} for i in range(4)]
    (tmp_path / "data" / "training_data.json").write_text(json.dumps(rows))
    arguments = ["--model", str(tiny()), "--model-name", "tiny", "--max-seq-length", "256"]
    # In float32: the tiny change of the basic configuration's learning rate drowns in bfloat16's noise.
    async with running_backend(tmp_path / "state", *arguments, "--dtype", "float32") as backend:
        (tmp_path / "config.yml").write_text(with_names_and_addresses(basic_configuration(), backend))
        command = [sys.executable, "-m", "insitu.cli", "finetune", "--config_file=config.yml"]
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=tmp_path, capture_output=True, text=True, timeout=500
        )
        print(done.stdout[-3000:], done.stderr[-3000:])
        assert done.returncode == 0
        async with backend.client() as client:
            steps = await client.steps("my_training_run")
            await base_model_is_back_without_a_restart(backend, client)
    output = tmp_path / ".tmp" / "nat" / "finetuning" / "output"
    lines = [json.loads(line) for line in (output / "training_metrics.jsonl").read_bytes().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(20))
    assert [step.step for step in steps] == [line["step"] for line in lines if line["step"]]
    assert len(steps) >= 15, "most epochs have groups with two different rewards"
    check_tokens(output, lines)
    assert f"Completed epoch {20}/{20}" in done.stdout
    assert (output / "reward_plot.png").stat().st_size > 10_000
    evaluations = output.parent / "eval"
    assert len(list(evaluations.glob("epoch-*/my_reward_output.json"))) == 20
