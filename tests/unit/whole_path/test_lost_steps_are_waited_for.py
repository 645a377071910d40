"""A run resumed on a backend that lost steps with damaged checkpoints waits until they are trained again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from insitu.types import JobState
from tests.support.finetune_bench import FinetuneBench, agent, by_generation, one_call, open_bench, rewards

pytestmark = pytest.mark.timeout(120)
failing: list[Any] = []


def fails_the_third_epoch(item: Any) -> float:
    if ".e2." in item.rollout_id and failing:
        failing.pop().fail_next_job = "out of luck"
    return by_generation(item)


async def two_steps(bench: FinetuneBench) -> None:
    """Train two steps of three; the third fails."""
    bench.project.configure(
        workflow=agent(one_call), eval=rewards(fails_the_third_epoch), finetuning={"num_epochs": 3}
    )
    failing.append(bench.backend)
    assert (await bench.run()).outcome == "failed"
    assert bench.backend.ledger.get_run("small").step == 2


async def test_a_resumed_run_waits_for_the_lost_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch, num_examples=2) as bench:
        await two_steps(bench)
        before = [job.id for job in bench.jobs()]
        bench.backend.train_seconds = 0.5
        bench.backend.ledger.fall_back("small", 0, "checkpoint 000001: state.json is missing")
        assert (await bench.run()).outcome == "succeeded"
        assert [job.id for job in bench.jobs()[:2]] == before
        assert [step.step for step in bench.backend.ledger.steps("small")] == [1, 2, 3]
        assert bench.backend.num_steps == 5, "two steps, two again, one more"
        (waits,) = [said for said in bench.progress.said if "were damaged" in said]
        assert waits.startswith("WARNING ")
        assert "fell back from step 2 to step 0" in waits
        assert "Run small is back at step 2" in bench.progress.said


async def test_a_run_that_cannot_get_its_steps_back_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch, num_examples=2) as bench:
        await two_steps(bench)
        ledger = bench.backend.ledger
        lost = bench.jobs()[1]
        bench.backend.train_seconds = 0.5
        ledger.fall_back("small", 1, "checkpoint 000002: state.json is missing")
        if ledger.get_job(lost.id).state is JobState.QUEUED:
            ledger.transition_job(lost.id, JobState.CANCELLED)
        refused = await bench.run()
        assert refused.outcome == "failed"
        assert "is at step 1 on this backend" in refused.reason
        assert "trained 2 steps" in refused.reason
