"""Settings of the objective from the YAML to the step: the KL penalty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.finetune_bench import agent, by_generation, one_call, open_bench, position, rewards

pytestmark = pytest.mark.timeout(120)


def training(**settings: Any) -> dict[str, Any]:
    return {"backend": {"training": settings}}


def even_groups_are_equal(item: Any) -> float:
    return by_generation(item) if position(item.rollout_id)[0] % 2 else 0.5


async def test_groups_without_spread_keep_their_kl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_bench(tmp_path, monkeypatch, num_examples=3) as bench:
        bench.project.configure(
            workflow=agent(one_call),
            eval=rewards(even_groups_are_equal),
            trainer_adapters=training(beta=0.1),
            finetuning={"num_epochs": 1},
        )
        assert (await bench.run()).outcome == "succeeded"
        (line,) = bench.epochs()
        assert line["account"]["dropped"] == {}
        assert (line["num_groups"], line["filtered_num_groups"]) == (3, 3)
        indices = {position(t.rollout_id)[0] for g in bench.trained_groups() for t in g.trajectories}
        assert indices == {0, 1, 2}
