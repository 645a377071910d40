"""Step rewards from a reward function through `insitu finetune` to what is trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from insitu.backend.batch import make_batch
from insitu.rewards.items import EvalItem, EvalResult
from insitu.rewards.trajectory import messages
from insitu.types import StepSettings
from tests.support.finetune_bench import agent, open_bench, position, rewards

pytestmark = pytest.mark.timeout(120)


async def three_calls(value: Any, context: Any) -> str:
    """Two of the workflow itself with one of a helper between them."""
    llm, talk = context.llm(), [{"role": "user", "content": str(value)}]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {llm.api_key}"}) as http:
        for function in (None, "helper", None):
            labels = {} if function is None else {"x-insitu-function": function}
            body = {"messages": talk, **llm.call_args()}
            async with http.post(f"{llm.base_url}/chat/completions", json=body, headers=labels) as got:
                got.raise_for_status()
                answer = (await got.json())["choices"][0]["message"]
            if function is None:
                talk += [answer, {"role": "user", "content": "go on"}]
    return answer["content"]


def helper_was_costly(item: EvalItem) -> EvalResult:
    """The same score for all; of each group the first rollout pays for its helper."""
    assert [call["function"] for call in item.calls] == [None, "helper", None]
    assert item.seconds is not None
    assert 0 < sum(call["timings"]["total"] for call in item.calls) <= item.seconds
    assert sum("call_id" in message for message in messages(item)) == 3
    _, generation = position(item.rollout_id)
    steps = {item.calls[1]["id"]: -0.5} if generation == 0 else {}
    return EvalResult(item.id, 1.0, step_rewards=steps)


async def test_equal_scores_with_different_steps_are_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch, num_examples=2) as bench:
        bench.project.configure(
            workflow=agent(three_calls), eval=rewards(helper_was_costly), finetuning={"num_epochs": 1}
        )
        assert (await bench.run()).outcome == "succeeded"
        records = {record["rollout_id"]: record for record in bench.records()}
        paying = [record for record in records.values() if record["generation"] == 0]
        assert [list(record["call_rewards"].values()) for record in paying] == [[-0.5]] * 2
        groups = bench.trained_groups()
        assert len(groups) == 2
        for group in groups:
            # What the helper cost is on the trained call before it, and on no other.
            assert [t.step_rewards for t in group.trajectories] == [[-0.5, 0.0], None, None, None]
            batch = make_batch([group], bench.backend._records, StepSettings(advantage="mean"), 0)
            found = [each for s in batch.sequences for each in dict.fromkeys(s.advantages.tolist()) if each]
            assert found == [-0.375] + [0.125] * 3, "of first calls, the second ones are all alike"
        (epoch,) = bench.epochs()
        training = bench.jobs()[0].metrics
        assert epoch["avg_reward"] == training["reward/mean"] == 1.0
        assert (training["reward/step/mean"], training["reward/return/min"]) == (-0.25, 0.5)
        assert (training["account/trained"], training["account/zero_variance"]) == (8, 0)
        assert (training["account/calls"], training["account/calls_trained"]) == (16, 16)
        assert "8 context-only" in json.dumps(epoch["account"])


def of_another_rollout(item: EvalItem) -> EvalResult:
    _, generation = position(item.rollout_id)
    return EvalResult(item.id, 1.0, step_rewards={"call-of-nobody": 1.0} if generation else {})


async def test_a_step_reward_for_an_unknown_call_fails_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch, num_examples=1) as bench:
        bench.project.configure(
            workflow=agent(three_calls), eval=rewards(of_another_rollout), finetuning={"num_epochs": 1}
        )
        await bench.run()
        ended = {record["generation"]: record for record in bench.records()}
        assert [ended[n]["ending"] for n in range(4)] == ["completed"] + ["evaluator_error"] * 3
        assert "names 'call-of-nobody', not among the 3 calls" in ended[1]["reason"]
        assert ended[1]["reward"] is None
