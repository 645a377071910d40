"""Rewards of endings from the configuration through `insitu finetune` to what is trained on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from insitu.errors import InsituError
from insitu.harness.collect.group_builder import GroupBuilder
from insitu.harness.dry_run import dry_run
from insitu.harness.interfaces.settings import BuilderConfig
from insitu.plugins import Kind, register
from tests.support.finetune_bench import FinetuneBench, agent, ask, one_call, open_bench, position, rewards

pytestmark = pytest.mark.timeout(120)

REWARDS = {"context_overflow": -0.5, "timeout": 0.25}
FATES = [
    ["fine", "overflow", "hang", "overflow-at-once"],
    ["fine", "raise", "overflow", "fine"],
    ["overflow", "overflow", "overflow", "raise"],
]


class StandinOverflow(Exception):
    """An engine's refusal of a conversation that no longer fits."""

    status_code = 400


async def fated(value: Any, context: Any) -> str:
    """Ends as its example and generation say, after one answered call."""
    index, generation = position(context.rollout_id)
    fate = FATES[index][generation]
    if fate != "overflow-at-once":
        answer = await one_call(value, context)
        if fate == "fine":
            return answer
        if fate == "hang":
            await asyncio.sleep(3600)
        if fate == "raise":
            raise KeyError("no such tool")
    try:
        await ask(context.llm(), [{"role": "user", "content": "too long"}], max_tokens=-1)
    except aiohttp.ClientResponseError as error:
        raise StandinOverflow("the maximum context length is 256 tokens") from error
    raise AssertionError("the gateway took a request that it should have rejected")


def one(_: Any) -> float:
    return 1.0


def configure(bench: FinetuneBench, **finetuning: Any) -> None:
    bench.project.configure(
        workflow=agent(fated),
        eval=rewards(one),
        finetuning={
            "num_epochs": 1,
            "rollout_timeout_seconds": 1.5,
            "ending_rewards": REWARDS,
            **finetuning,
        },
    )


def rewards_of(bench: FinetuneBench) -> list[list[float | None]]:
    table: list[list[float | None]] = [[None] * 4 for _ in FATES]
    for record in bench.records():
        table[record["index"]][record["generation"]] = record["reward"]
    return table


async def test_failures_of_the_policy_stay_in_their_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch, num_examples=len(FATES)) as bench:
        configure(bench)
        assert (await bench.run()).outcome == "succeeded"
        assert rewards_of(bench) == [
            [1.0, -0.5, 0.25, None],
            [1.0, None, -0.5, 1.0],
            [-0.5, -0.5, -0.5, None],
        ]
        reasons = {(r["index"], r["generation"]): r["reason"] for r in bench.records()}
        assert "maximum context length" in reasons[0, 1]
        assert "not given the reward of its ending: it has no call to train on" in reasons[0, 3]
        groups = bench.trained_groups()
        found = [[(t.ending.value, t.reward) for t in group.trajectories] for group in groups]
        assert sorted(found) == [
            [("completed", 1.0), ("context_overflow", -0.5), ("completed", 1.0)],
            [("completed", 1.0), ("context_overflow", -0.5), ("timeout", 0.25)],
        ]
        (epoch,) = bench.epochs()
        assert epoch["avg_reward"] == pytest.approx((3 - 5 * 0.5 + 0.25) / 9)
        account = epoch["account"]
        assert account["rewarded_endings"] == {"context_overflow": 5, "timeout": 1}
        assert account["endings"] == {"context_overflow": 1, "tool_error": 2}
        assert (account["trained"], account["dropped"]) == (6, {"failed": 3, "zero_variance": 3})
        assert account["line"] == (
            "trained 6/12: 3 failed, 3 zero-variance; failed with a reward: 5 context-overflow, 1 timeout; "
            "calls 17 seen = 6 trained + 11 dropped (6 unrecorded, 3 zero-variance, 2 failed)"
        )
        assert account["calls_confirmed"] is True
        assert bench.jobs()[0].metrics["reward/min"] == -0.5


async def test_without_the_setting_failures_leave_their_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch, num_examples=len(FATES)) as bench:
        configure(bench, ending_rewards={})
        await bench.run()
        assert rewards_of(bench) == [[1.0, None, None, None], [1.0, None, None, 1.0], [None] * 4]
        (epoch,) = bench.epochs()
        assert epoch["account"]["line"].startswith("trained 0/12: 9 failed")
        assert epoch["account"]["rewarded_endings"] == {}


async def test_an_interrupted_run_keeps_the_rewards_of_its_endings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch, num_examples=len(FATES)) as bench:
        configure(bench)
        async with bench.opened() as (run, made):
            await made.trainer.initialize(run)
            await made.builder.start_run(run.run_id)
            await made.builder.finalize(run.run_id)
            await made.trainer.cleanup()
        before = {record["rollout_id"]: record["reward"] for record in bench.records()}
        assert (await bench.run()).outcome == "succeeded"
        assert {record["rollout_id"]: record["reward"] for record in bench.records()} == before
        assert sum(len(group.trajectories) for group in bench.trained_groups()) == 6
        configure(bench, ending_rewards={"timeout": 0.0})
        with pytest.raises(InsituError, match=r"finetuning.ending_rewards.timeout: 0\.25 → 0\.0"):
            await bench.run()


async def doomed(value: Any, context: Any) -> str:
    await one_call(value, context)
    raise StandinOverflow("the maximum context length is 256 tokens")


async def test_a_run_whose_first_rollouts_all_fail_still_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(
            workflow=agent(doomed), eval=rewards(one), finetuning={"ending_rewards": REWARDS}
        )
        summary = await bench.run()
        assert summary.outcome == "failed"
        assert "all 12 rollouts failed: 12 × context_overflow" in str(summary.reason)


@register(Kind.TRAJECTORY_BUILDER, "without_ending_rewards", BuilderConfig)
class WithoutEndingRewards(GroupBuilder):
    """Written before there were any."""

    ending_rewards = False


async def test_a_builder_that_does_not_give_them_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        builder = {"groups": {"_type": "without_ending_rewards"}}
        bench.project.configure(trajectory_builders=builder, finetuning={"ending_rewards": REWARDS})
        with pytest.raises(InsituError, match="WithoutEndingRewards leaves failed rollouts without a reward"):
            await bench.run()
        assert not bench.project.output.exists()


async def test_a_dry_run_tells_the_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        async with bench.backend.client() as client:
            await client.register_run("small", "tiny")
            await client.wait_run_ready("small", 20)
        bench.project.configure(finetuning={"ending_rewards": REWARDS})
        said: list[str] = []
        assert await dry_run(bench.loaded(), said.append)
        assert "rewards of failed rollouts: context_overflow -0.5, timeout 0.25" in "\n".join(said)
        assert "_type:" not in "\n".join(said), "the checks are not preceded by the configuration"
