"""The default schedule: its journal and its steps are, figure for figure, those of the release before."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.support.finetune_bench import agent, one_call, open_bench, position, rewards

RECORDED = Path(__file__).parents[1] / "harness" / "data" / "synchronous_run.json"
"""Written by the release before `finetuning.schedule`: run this module's `recorded` there."""
OF_ONE_RUN = {"at", "timestamp", "url", "path", "job_id", "sha256", "run_id", "inputs"}
"""Keys whose values differ from run to run."""


def some_equal(item: Any) -> float:
    index, generation = position(item.rollout_id)
    return 0.5 if index < 2 else (index + generation) / 100


async def recorded(tmp_path: Path, monkeypatch: Any) -> dict[str, Any]:
    """What a small run writes, without what differs from run to run."""
    async with open_bench(tmp_path, monkeypatch, num_examples=8) as bench:
        bench.project.configure(
            workflow=agent(one_call),
            eval=rewards(some_equal),
            trajectory_builders={"groups": {"num_generations": 2}},
            finetuning={"num_epochs": 2, "groups_per_step": 3, "max_refill": 1},
        )
        options = {"validation_dataset": "validation.json", "validation_interval": 1, "validation_steps": 2}
        summary = await bench.run(**options)
        assert summary.outcome == "succeeded", summary.reason
        stores = sorted(path.name for path in (bench.project.output / "trajectories").iterdir())
        ledger = bench.backend.ledger
        jobs = [[g.trajectories for g in ledger.groups_of_job(job.id)] for job in bench.jobs()]
        found = {
            "journal": bench.project.lines("journal.jsonl"),
            "steps": bench.project.lines("steps.jsonl"),
            "folders": sorted(path.name for path in bench.project.output.iterdir()),
            "stores": stores,
            "trained": [[[position(t.rollout_id) for t in group] for group in groups] for groups in jobs],
        }
        return json.loads(json.dumps(_comparable(found)))


def _comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _comparable(each)
            for key, each in value.items()
            if key not in OF_ONE_RUN and not key.startswith("time/")
        }
    if isinstance(value, list):
        return [_comparable(each) for each in value]
    return re.sub(r"run_[0-9a-f]{8}|job-\w+", "…", value) if isinstance(value, str) else value


async def test_nothing_of_a_run_has_changed(tmp_path, monkeypatch):
    assert await recorded(tmp_path, monkeypatch) == json.loads(RECORDED.read_text())
