"""A planner, two workers and a judge over two models: exactly the planner's tokens are trained."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer

from insitu.backend.batch import make_batch
from insitu.backend.ledger import Ledger, ledger_url
from insitu.records.store import RecordStore
from insitu.testing.models import tiny
from insitu.training.selection import Batch
from insitu.types import ModelCall, StepSettings
from tests.support.backend import Backend, running_backend

NUM_EXAMPLES, NUM_GENERATIONS = 2, 4
NUM_ROLLOUTS = NUM_EXAMPLES * NUM_GENERATIONS

AGENT = '''
"""A planner that is trained, a worker with its weights, a worker and a judge with the untrained model."""

import asyncio
import zlib

import insitu

STOP = ["a", "e", "i", "o"]  # a random model ends no answer by itself, and cut ones are not trained on


async def ask(client, model, messages):
    answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=96, stop=STOP)
    return answer.choices[0].message.content or ""


@insitu.function("worker")
async def work(client, model, task):
    return await ask(client, model, [{"role": "user", "content": f"Do this: {task}"}])


async def run(question, context):
    # Made before any function is named: each call says by itself to which one it belongs.
    policy, base = context.client("openai", "policy"), context.client("openai", "base")
    own, other = context.llm("policy").model, context.llm("base").model
    talk = [{"role": "user", "content": f"Plan: {question}"}]
    with insitu.function("planner"):
        plan = await ask(policy, own, talk)
    results = await asyncio.gather(work(policy, own, plan), work(base, other, plan))
    talk += [{"role": "assistant", "content": plan}, {"role": "user", "content": f"Sum up: {results}"}]
    with insitu.function("planner"):
        answer = await ask(policy, own, talk)
    with insitu.function("judge"):
        await ask(base, other, [{"role": "user", "content": f"Is this good? {answer}"}])
    return answer


def spread(item):
    """Different for every rollout, so that every group teaches something."""
    return zlib.crc32(item.rollout_id.encode()) / 2**32
'''

SCORE = {"type": "object", "properties": {"score": {"enum": [0, 1]}}, "required": ["score"]}


def judge_options() -> dict[str, Any]:
    """Under a grammar even a random model judges; left to itself it would fill the answer with spaces."""
    tokenizer = Tokenizer.from_file(str(tiny() / "tokenizer.json"))
    ids = {tokenizer.token_to_id(word) for word in [*'{"score":01}', "<|im_end|>"]}
    needed = sorted(token for token in ids if token is not None)
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCORE}}
    return {"response_format": form, "allowed_token_ids": needed, "max_tokens": 32}


def configuration(backend: Backend) -> dict[str, Any]:
    address = {"_type": "openai", "base_url": f"{backend.gateway_url}/v1", "api_key": "default"}
    port = int(backend.api_url.rpartition(":")[2])
    return {
        "llms": {
            "policy": {**address, "model_name": "tiny"},
            "base": {**address, "model_name": "tiny"},
            "judge": {**address, "model_name": "tiny", **judge_options()},
        },
        "workflow": {"_type": "python", "entry": "planning:run", "llm": "policy"},
        "eval": {
            "general": {"dataset": {"_type": "json", "file_path": "train.json"}},
            "evaluators": {
                "judge": {"_type": "llm_judge", "llm": "judge"},
                "spread": {"_type": "python", "entry": "planning:spread"},
                "reward": {"_type": "weighted", "evaluators": {"judge": 0.5, "spread": 0.5}},
            },
        },
        "trajectory_builders": {"groups": {"_type": "insitu", "num_generations": NUM_GENERATIONS}},
        "trainer_adapters": {
            "backend": {
                "_type": "insitu",
                "backend": {"ip": "127.0.0.1", "port": port, "name": "plans", "base_model": "tiny"},
            }
        },
        "trainers": {"epochs": {"_type": "insitu"}},
        "finetuning": {
            "enabled": True,
            "trainer": "epochs",
            "trajectory_builder": "groups",
            "trainer_adapter": "backend",
            "reward_function": {"name": "reward"},
            "target_functions": ["planner"],
            "target_model": "policy",
            "num_epochs": 1,
            "output_dir": "output",
        },
    }


async def insitu(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "insitu.cli", *arguments]
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.sweep
@pytest.mark.timeout(600)
async def test_exactly_the_planners_tokens_carry_gradient(tmp_path: Path) -> None:
    (tmp_path / "planning.py").write_text(AGENT)
    rows = [{"id": f"row-{n}", "question": f"task {n}", "answer": "x"} for n in range(NUM_EXAMPLES)]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    arguments = ["--model", str(tiny()), "--model-name", "tiny", "--dtype", "float32"]
    arguments += ["--publication", "adapter", "--placement", "dedicated", "--max-seq-length", "1024"]
    async with running_backend(tmp_path / "state", *arguments) as backend:
        (tmp_path / "config.yml").write_text(yaml.safe_dump(configuration(backend)))
        said = await insitu(tmp_path, "finetune", "--config_file=config.yml")
        listed = json.loads(await insitu(tmp_path, "trajectories", "list", "output", "--json"))
        one = listed["rollouts"][0]["rollout_id"]
        shown = json.loads(await insitu(tmp_path, "trajectories", "show", "config.yml", one, "--json"))
        async with backend.client() as client:
            (step,) = await client.steps("plans")
            job = await client.get_job(step.job_id)
    (line,) = [
        json.loads(text) for text in (tmp_path / "output/training_metrics.jsonl").read_text().splitlines()
    ]
    batch, calls = the_step(tmp_path / "state", job.id)
    check_recorded(calls)
    num_trained = check_sequences(batch, calls)
    assert job.metrics["num_tokens"] == num_trained, "the step itself had no other tokens in its loss"
    check_account(line["account"], job.metrics, said)
    check_shown(shown)


def the_step(state: Path, job_id: str) -> tuple[Batch, list[ModelCall]]:
    """What the step was made of, built again from the ledger and the records; and every recorded call."""
    records = RecordStore(f"sqlite:///{state / 'calls.db'}")
    with Ledger(ledger_url(state)) as ledger:
        groups = ledger.groups_of_job(job_id)
        batch = make_batch(groups, records, StepSettings(), 0)
    rollouts = [trajectory.rollout_id for group in groups for trajectory in group.trajectories]
    calls = [call for rollout in rollouts for call in records.by_rollout(rollout)]
    records.close()
    assert len(rollouts) == NUM_ROLLOUTS
    return batch, calls


def check_recorded(calls: list[ModelCall]) -> None:
    """Everything that was asked is recorded under its rollout, by the part and the model that made it."""
    parts = Counter((call.function, call.run) for call in calls)
    judged = parts.pop(("<evaluator>", None))
    assert judged == NUM_ROLLOUTS
    assert parts == {
        ("planner", "plans"): 2 * NUM_ROLLOUTS,
        ("worker", "plans"): NUM_ROLLOUTS,
        ("worker", None): NUM_ROLLOUTS,
        ("judge", None): NUM_ROLLOUTS,
    }


def check_sequences(batch: Batch, calls: list[ModelCall]) -> int:
    """Every token in the loss was sampled for the planner, and none of the planner's is missing."""
    planned: dict[str, list[tuple[int, float]]] = {}
    for call in sorted(calls, key=lambda call: call.started_at):
        if call.function == "planner":
            sampled = zip(call.output_ids, call.logprobs, strict=True)
            planned.setdefault(call.rollout_id or "", []).extend(sampled)
    trained: dict[str, list[tuple[int, float]]] = {}
    for sequence in batch.sequences:
        columns = (column[sequence.mask].tolist() for column in (sequence.token_ids, sequence.logprobs))
        sampled = list(zip(*columns, strict=True))
        trained.setdefault(sequence.rollout_id, []).extend(sampled)
    left_out = batch.metrics["account/truncated"]
    assert len(trained) + left_out == NUM_ROLLOUTS
    assert left_out < NUM_ROLLOUTS / 2, "nearly all planners came to their end"
    assert trained == {rollout: planned[rollout] for rollout in trained}
    return sum(map(len, trained.values()))


def check_account(account: dict[str, Any], metrics: dict[str, float], said: str) -> None:
    calls = account["calls"]
    assert account["calls_confirmed"] is True
    assert calls["uncounted"] == 0
    assert calls["context_only"] == {"other_function": NUM_ROLLOUTS, "other_model": 3 * NUM_ROLLOUTS}
    assert calls["trained"] == metrics["account/calls_trained"]
    assert calls["trained"] + sum(calls["dropped"].values()) == 2 * NUM_ROLLOUTS
    total = calls["trained"] + sum(calls["context_only"].values()) + sum(calls["dropped"].values())
    assert calls["seen"] == total
    assert f"calls {total} seen = {calls['trained']} trained + " in said
    assert f"model calls        {total} seen" in said


def check_shown(shown: dict[str, Any]) -> None:
    """The gateway gives the texts of the tokens; they are the answer that the agent got."""
    assert shown["texts_from"].startswith("the gateway at ")
    kinds = Counter((call["function"], call["left_out_as"]) for call in shown["calls"])
    assert kinds["planner", None] == 2
    assert kinds["worker", "other_function"] == kinds["worker", "other_model"] == 1
    assert kinds["<evaluator>", "other_model"] == kinds["judge", "other_model"] == 1
    for call in shown["calls"]:
        assert len(call["output_pieces"]) == len(call["output_ids"]) == len(call["logprobs"])
        assert (call["answer"].get("content") or "") in "".join(call["output_pieces"])
    assert set(shown["metadata"]["components"]) == {"judge", "spread"}
