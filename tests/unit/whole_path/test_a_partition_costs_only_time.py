"""The network between harness and backend is cut in the middle of a run: it waits, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from insitu.wire.transport import RetryPolicy
from tests.support.finetune_bench import FinetuneBench, agent, by_generation, one_call, open_bench, rewards
from tests.support.partition import Partition

pytestmark = pytest.mark.timeout(120)
QUICK = RetryPolicy(max_attempts=3, first_seconds=0.02, most_seconds=0.1, outage_seconds=30.0)
CUT_SECONDS = 1.5
to_cut: list[Partition] = []
healing: list[asyncio.Task[Any]] = []


def cut() -> None:
    """Cut all networks for a while, once."""
    while to_cut:
        healing.append(asyncio.create_task(to_cut.pop().cut_for(CUT_SECONDS)))


async def cut_in_the_second_epoch(value: Any, context: Any) -> str:
    if ".e1." in context.rollout_id:
        cut()
        await asyncio.sleep(0.05)
    return await one_call(value, context)


async def cut_by_the_reward(item: Any) -> float:
    if ".e1." in item.rollout_id:
        cut()
    return by_generation(item)


@asynccontextmanager
async def bench_behind_networks(
    path: Path, monkeypatch: pytest.MonkeyPatch, workflow: Any, reward: Any
) -> AsyncIterator[FinetuneBench]:
    for module in ("finetune", "backend_adapter"):
        monkeypatch.setattr(f"insitu.harness.{module}.PATIENT", QUICK)
    async with (
        open_bench(path, monkeypatch, num_examples=3) as bench,
        Partition(bench.backend.port) as api,
        Partition(bench.backend.gateway_port) as gateway,
    ):
        to_cut[:] = [api, gateway]
        bench.project.configure(
            llms={"policy": {"base_url": f"http://127.0.0.1:{gateway.port}/v1"}},
            workflow=agent(workflow),
            eval=rewards(reward),
            trainer_adapters={"backend": {"backend": {"port": api.port}}},
            finetuning={"num_epochs": 3},
        )
        yield bench
        await asyncio.gather(*healing)
        healing.clear()


@pytest.mark.parametrize(
    ("workflow", "reward"),
    [(cut_in_the_second_epoch, by_generation), (one_call, cut_by_the_reward)],
    ids=["in-rollouts", "in-uploads"],
)
async def test_a_run_outlives_a_partition(
    workflow: Any, reward: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench_behind_networks(tmp_path, monkeypatch, workflow, reward) as bench:
        summary = await bench.run()
        assert summary.outcome == "succeeded", summary.reason
        assert to_cut == [], "the network was cut"
        assert [line["account"]["dropped"] for line in bench.epochs()] == [{}] * 3
        trained = [len(bench.backend.ledger.groups_of_job(job.id)) for job in bench.jobs()]
        assert trained == [3, 3, 3], "every group is trained on, once"
        waits = [said for said in bench.progress.said if "cannot be reached; waiting" in said]
        back = [said for said in bench.progress.said if "answers again" in said]
        assert 1 <= len(waits) <= 2, "each of API and gateway is said once"
        assert len(back) == len(waits)
        if workflow is cut_in_the_second_epoch:
            (repeated,) = [said for said in bench.progress.said if "were run again" in said]
            assert repeated.startswith("WARNING 12 rollouts failed while the gateway")
