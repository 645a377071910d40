"""Re-sampling from forks on real vLLM: from the exact ids, by the weights that the answer names."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from insitu.records.store import RecordStore
from insitu.testing.models import tiny
from insitu.types import ModelCall
from insitu.view.answers.groups import group_view
from insitu.view.answers.resampling import BesideAgent, Fork
from insitu.view.run import ViewedRun
from insitu.wire.views.groups import GroupView, ResampledFork
from tests.support.adapter_scores import score_gaps
from tests.support.backend import running_backend
from tests.support.finetuning import Project

EXACT = 1e-3
AGENT = """
import zlib

import aiohttp


async def answer(value, context):
    llm = context.llm()
    body = {"messages": [{"role": "user", "content": str(value)}], "max_tokens": 64, **llm.call_args()}
    body["stop"] = ["a", "e", "i"]  # a random model ends no answer by itself, and cut ones are not trained on
    headers = {"Authorization": f"Bearer {llm.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(f"{llm.base_url}/chat/completions", json=body) as got:
            got.raise_for_status()
            return (await got.json())["choices"][0]["message"]["content"] or ""


def reward(item):
    return (zlib.crc32(item.output.encode()) % 1000) / 1000
"""


@pytest.mark.sweep
@pytest.mark.timeout(600)
async def test_a_fork_goes_on_from_its_exact_ids_with_any_kept_step(tmp_path: Path) -> None:
    arguments = ["--model", str(tiny()), "--model-name", "tiny", "--dtype", "float32"]
    arguments += ["--max-seq-length", "256"]
    state = tmp_path / "state"
    async with running_backend(state, *arguments) as backend:
        port = int(backend.api_url.rpartition(":")[2])
        project = Project(tmp_path / "project", port, backend.gateway_url, num_examples=1)
        (project.path / "small_agent.py").write_text(AGENT)
        training = {"backend": {"training": {"learning_rate": 3e-2}}}
        file = project.configure(trainer_adapters=training, finetuning={"num_epochs": 2})
        done = await asyncio.to_thread(project.run, timeout=400)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        made = await asyncio.to_thread(resample_all, project.output, file, tmp_path / "index.db")
    (by_base, by_first, within), second = made[:3], made[3]
    # The first epoch was sampled by the base model, the second by step 1: each is scored again by its own.
    assert by_base.score_gap is not None
    assert by_base.score_gap <= EXACT
    assert second.score_gap is not None
    assert second.score_gap <= EXACT
    assert by_first.score_gap is None, "other weights sampled the record"
    assert within.score_gap is None, "one sibling alone went on from here"
    for each in made:
        assert each.reward_note == ""
        assert all(branch.reward is not None for branch in each.branches)
    check_weights(state, made)


def resample_all(output: Path, file: Path, index: Path) -> list[ResampledFork]:
    """Go on from the first fork of both epochs, and from within an answer."""
    run = ViewedRun("run", output, tokenizer=tiny(), index=index)
    beside = BesideAgent.of(file)
    try:
        while not run.index.refresh():
            pass
        views = [group_view(run, f"epoch-{epoch:04d}", 0, 64) for epoch in range(2)]
        forks = [first_fork(view) for view in views]
        inside = Fork(forks[0].rollout_id, 0, forks[0].depth + 1)
        asked = [(0, forks[0], None), (0, forks[0], 1), (0, inside, None), (1, forks[1], 1)]
        return [
            beside.resampling.fork(run, f"epoch-{epoch:04d}", 0, fork, step, 4, 12)
            for epoch, fork, step in asked
        ]
    finally:
        run.close()


def first_fork(view: GroupView) -> Fork:
    """The end of the root, where the siblings of a random model part: with the prompt, or soon after it."""
    root = view.tree.nodes[0]
    assert len(root.children) > 1
    branch = max(view.tree.branches, key=lambda each: each.num_tokens)
    return Fork(view.tree.siblings[branch.sibling].rollout_id, branch.sequence, len(root.ids))


def check_weights(state: Path, made: list[ResampledFork]) -> None:
    """By plain Transformers and PEFT, the named weights alone make what was recorded as likely as it says."""
    records = RecordStore(f"sqlite:///{state / 'calls.db'}")
    try:
        calls: list[ModelCall] = records.get([branch.call_id for each in made for branch in each.branches])
    finally:
        records.close()
    steps = [each.step or 0 for each in made for _ in each.branches]
    assert [call.policy_step for call in calls] == steps
    shown = [branch for each in made for branch in each.branches]
    assert [(call.output_ids, call.logprobs) for call in calls] == [(b.ids, b.logprobs) for b in shown]
    adapter = state / "runs" / "small" / "checkpoints" / "000001" / "adapter"
    gaps = {0: score_gaps(calls, None), 1: score_gaps(calls, adapter)}
    for place, step in enumerate(steps):
        assert gaps[step][place] <= EXACT
        assert gaps[1 - step][place] > EXACT, "the two steps are too alike to tell them apart"
