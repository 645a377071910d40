"""Training settings from the YAML to the backend: the KL penalty, the adapter, the schedule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from insitu.errors import Conflict, InvalidRequest
from insitu.harness.dry_run import dry_run
from insitu.harness.interfaces.settings import AdapterConfig
from insitu.types import LoraSettings
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


async def test_the_adapter_is_chosen_in_the_file_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"rank": 32, "alpha": 64, "target_modules": ["q_proj", "v_proj"], "seed": 7}
    async with open_bench(tmp_path, monkeypatch, num_examples=2) as bench:
        bench.project.configure(
            workflow=agent(one_call),
            eval=rewards(by_generation),
            trainer_adapters={"backend": {"lora": chosen}},
            finetuning={"num_epochs": 1},
        )
        summary = await bench.run()
        assert (summary.outcome, summary.lora_rank) == ("succeeded", 32)
        assert bench.backend.ledger.get_run("small").lora == LoraSettings(**chosen)
        bench.project.configure(
            workflow=agent(one_call),
            eval=rewards(by_generation),
            trainer_adapters={"backend": {"lora": {**chosen, "rank": 16}}},
            finetuning={"num_epochs": 2},
        )
        with pytest.raises(Conflict, match=r"trainer_adapters\.backend\.lora\.rank: 32 → 16"):
            await bench.run()
        # In another directory it is another run, which the backend knows under the same name.
        bench.project.configure(
            workflow=agent(one_call),
            eval=rewards(by_generation),
            trainer_adapters={"backend": {"lora": {**chosen, "rank": 16}}},
            finetuning={"num_epochs": 2, "output_dir": "other"},
        )
        refused = await bench.run()
        assert refused.outcome == "failed"
        assert "'rank': 32" in refused.reason
        assert "'rank': 16" in refused.reason


@pytest.mark.parametrize(
    ("lora", "place"),
    [
        ({"rank": 0}, "rank"),
        ({"rank": 513}, "rank"),
        ({"dropout": 0.1}, "dropout"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": ["self_attn.*"]}, "target_modules"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused_by_its_place(lora: dict[str, Any], place: str) -> None:
    backend = {"ip": "localhost", "port": 7623}
    with pytest.raises(ValidationError, match=place):
        AdapterConfig.model_validate({"_type": "insitu", "backend": backend, "lora": lora})


failing: list[Callable[[], None]] = []


def fails_the_second_epoch(item: Any) -> float:
    if ".e1." in item.rollout_id and failing:
        failing.pop()()
    return by_generation(item)


async def test_every_update_has_the_rate_of_its_number_also_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"training": {"learning_rate": 0.01}, "schedule": {"kind": "linear", "warmup_steps": 2}}
    expected = [0.005, 0.01, 0.01, 0.0075, 0.005, 0.0025]
    async with open_bench(tmp_path, monkeypatch, num_examples=4) as bench:
        bench.project.configure(
            workflow=agent(one_call),
            eval=rewards(fails_the_second_epoch),
            trainer_adapters={"backend": fields},
            finetuning={"num_epochs": 3, "groups_per_step": 2},
        )
        # A step of the second epoch fails: the same command repeats it, with the same rate.
        failing.append(lambda: setattr(bench.backend, "fail_next_job", "out of luck"))
        assert (await bench.run()).outcome == "failed"
        assert len(bench.jobs()) == 2
        assert (await bench.run()).outcome == "succeeded"
        assert [job.settings.learning_rate for job in bench.jobs()] == pytest.approx(expected)


async def test_a_schedule_that_does_not_fit_the_plan_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch, num_examples=2) as bench:
        bench.project.configure(
            workflow=agent(one_call),
            eval=rewards(by_generation),
            trainer_adapters={"backend": {"schedule": {"kind": "cosine", "warmup_steps": 2}}},
            finetuning={"num_epochs": 2},
        )
        with pytest.raises(InvalidRequest, match="makes 2 updates at most"):
            await bench.run()
        said: list[str] = []
        assert not await dry_run(bench.loaded(), said.append)
        assert any("FAILED" in line and "warmup_steps is 2" in line for line in said)
        assert not bench.project.output.exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"overlong_buffer": 5},
        {"overlong_penalty": 1.0},
        {"overlong_tokens": 5, "overlong_buffer": 6},
    ],
)
def test_a_penalty_on_length_that_contradicts_itself_is_refused(settings: dict[str, Any]) -> None:
    backend = {"ip": "localhost", "port": 7623}
    with pytest.raises(ValidationError, match="overlong_tokens"):
        AdapterConfig.model_validate({"_type": "insitu", "backend": backend, "training": settings})


def always_half(item: Any) -> float:
    return 0.5


async def test_groups_of_equal_rewards_reach_the_penalty_on_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch, num_examples=2) as bench:
        bench.project.configure(
            workflow=agent(one_call),
            eval=rewards(always_half),
            trainer_adapters=training(overlong_tokens=1),
            finetuning={"num_epochs": 1},
        )
        assert (await bench.run()).outcome == "succeeded"
        assert len(bench.trained_groups()) == 2
        assert bench.epochs()[0]["training"]["account/overlong"] == 8
