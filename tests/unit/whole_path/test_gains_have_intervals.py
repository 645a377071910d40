"""Gains with an interval: several samples per example, the best step measured again, step 0 a candidate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from insitu.errors import InvalidRequest
from insitu.harness.collect.group_builder import GroupBuilder
from insitu.harness.gains.gain import GainOutcome
from insitu.harness.rollouts.rollout import Rollout
from tests.support.finetune_bench import FinetuneBench, agent, ask, open_bench, rewards

VALIDATED = {"validation_dataset": "validation.json", "validation_interval": 1}


async def one_call(value: Any, context: Any) -> str:
    answer = await ask(context.llm(), [{"role": "user", "content": str(value)}])
    return answer["message"]["content"]


async def no_second_measurement(value: Any, context: Any) -> str:
    if "remeasured" in context.rollout_id:
        raise RuntimeError("told to fail")
    return await one_call(value, context)


async def temperature_of_its_own(value: Any, context: Any) -> str:
    answer = await ask(context.llm(), [{"role": "user", "content": str(value)}], temperature=0.7)
    return answer["message"]["content"]


def generation(item: Any) -> int:
    return int(item.rollout_id.split(".")[-2])


def best_at_two(item: Any) -> float:
    """Rewards of validations depend on the step that answered; step 2 is lucky when it is chosen."""
    if ".validation" not in item.rollout_id and ".remeasured" not in item.rollout_id:
        return generation(item) / 10
    by_step = {0: 0.1, 1: 0.2, 2: 0.9, 3: 0.5}[item.calls[-1]["policy_step"]]
    return by_step - (0.2 if ".remeasured" in item.rollout_id else 0.0) + 0.05 * generation(item)


def always_half(item: Any) -> float:
    return generation(item) / 10 if ".validation" not in item.rollout_id else 0.5


def journal(bench: FinetuneBench, kind: str) -> list[dict[str, Any]]:
    return [line for line in bench.project.lines("journal.jsonl") if line["event"] == kind]


def configure(bench: FinetuneBench, reward: Any = best_at_two, workflow: Any = one_call, **more: Any) -> None:
    bench.project.write_rows("validation.json", 8, start=1000)
    bench.project.configure(
        workflow=agent(workflow), eval=rewards(reward), finetuning={"num_epochs": 3, **more}
    )


async def test_the_best_step_is_measured_again_and_compared_with_step_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        configure(bench)
        summary = await bench.run(**VALIDATED, validation_samples=2)
        assert (summary.outcome, summary.best_step) == ("succeeded", 2), summary.reason
        # By hand: step 2 answers with 0.7 and 0.75 when measured again, step 0 with 0.1 and 0.15.
        assert summary.gain is not None
        said = summary.gain.sentence("step 0", "step 2")
        assert said.startswith(
            "The difference of these two checkpoints is real: step 2 is better than step 0 (+0.600, "
        )
        assert "96.67 % interval" in said, "three steps were compared"
        assert (summary.best_remeasured, summary.best_reward) == ("0.7250 ± 0.0000", pytest.approx(0.925))
        again = bench.records("remeasured-000002")
        assert len(again) == 16
        assert {call["model"] for record in again for call in record["calls"]} == {"small@2"}
        assert {call["policy_step"] for record in again for call in record["calls"]} == {2}
        history = bench.validations(all_of_them=True)
        assert [entry["step"] for entry in history] == [0, 1, 2, 2, 3]
        assert history[3]["remeasured"] is True
        assert history[3]["gain"]["verdict"] == "better"
        assert (history[0]["num_samples"], history[0]["num_examples"]) == (2, 8)
        assert history[0]["standard_error"] == 0.0
        assert "rewards" not in history[0], "the rewards of each example are in the journal"
        assert any(
            "Best: step 2 - Avg Reward: 0.7250 ± 0.0000 measured again" in s for s in bench.progress.said
        )
        assert any("(8 examples × 2, 0 failed)" in line for line in bench.progress.said)
        # The same command finds everything done: nothing is measured a third time.
        before = len(journal(bench, "remeasured"))
        assert (await bench.run(**VALIDATED, validation_samples=2)).gain == summary.gain
        assert len(journal(bench, "remeasured")) == before == 1


async def test_a_second_measurement_that_failed_is_repeated_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        configure(bench, workflow=no_second_measurement)
        summary = await bench.run(**VALIDATED)
        assert (summary.outcome, summary.best_step, summary.gain) == ("succeeded", 2, None)
        assert any("could not be measured again: all 8 rollouts failed" in s for s in bench.progress.said)
        assert not journal(bench, "remeasured")
        monkeypatch.setattr(f"{__name__}.no_second_measurement", one_call)
        gain = (await bench.run(**VALIDATED)).gain
        assert gain is not None
        assert gain.outcome is GainOutcome.BETTER
        assert len(journal(bench, "remeasured")) == 1


async def test_the_model_before_training_may_be_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        configure(bench, always_half, num_epochs=2)
        summary = await bench.run(**VALIDATED)
        assert (summary.best_step, summary.best_reward, summary.checkpoint_path) == (0, 0.5, None)
        assert summary.gain is None
        assert not journal(bench, "remeasured")


async def test_validations_have_their_own_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        configure(bench, always_half, num_epochs=1)
        assert (await bench.run(**VALIDATED, validation_temperature=0.0)).outcome == "succeeded"

        def used(name: str) -> set[float]:
            return {call["sampling"]["temperature"] for each in bench.records(name) for call in each["calls"]}

        assert used("validation-0000") == {0.0}
        assert used("epoch-0000") == {1.0}, "rollouts to train on keep the temperature of `llms`"


async def test_a_temperature_that_the_agent_ignores_is_refused_before_the_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        configure(bench, always_half, temperature_of_its_own, num_epochs=1)
        summary = await bench.run(**VALIDATED, validation_temperature=0.0)
        assert (summary.outcome, summary.updates) == ("failed", 0)
        assert "validation_temperature is 0, but the agent's calls have temperature 0.7" in summary.reason


async def test_samples_are_refused_for_a_builder_that_takes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run_eval(_self: Any, *, name: str | None = None, title: str | None = None) -> list[Rollout]:
        raise AssertionError(f"not called: {name} {title}")

    async with open_bench(tmp_path, monkeypatch) as bench:
        configure(bench)
        monkeypatch.setattr(GroupBuilder, "run_eval", run_eval)
        with pytest.raises(InvalidRequest, match=r"validation_samples is 2, but GroupBuilder\.run_eval runs"):
            await bench.run(**VALIDATED, validation_samples=2)
        assert not bench.project.output.exists(), "nothing has run"


async def test_a_best_step_that_cannot_be_served_is_said_and_not_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        configure(bench)
        lend = type(bench.backend.ledger).make_lease_ready

        def refuse(ledger: Any, lease: Any) -> None:
            ledger.end_leases("told to refuse")

        monkeypatch.setattr(type(bench.backend.ledger), "make_lease_ready", refuse)
        summary = await bench.run(**VALIDATED)
        assert (summary.outcome, summary.gain) == ("succeeded", None)
        said = [line for line in bench.progress.said if "could not be measured again" in line]
        assert len(said) == 1
        assert "told to refuse" in said[0]
        monkeypatch.setattr(type(bench.backend.ledger), "make_lease_ready", lend)
        gain = (await bench.run(**VALIDATED)).gain
        assert gain is not None
        assert gain.outcome is GainOutcome.BETTER


def test_a_journal_of_an_earlier_release_has_no_gain(tmp_path: Path) -> None:
    from insitu.config.curriculum import CurriculumConfig
    from insitu.harness.files.journal import Journal
    from insitu.harness.interfaces import events
    from insitu.harness.loop.best import gain_of
    from insitu.harness.loop.state import fold

    entry = {"epoch": 0, "step": 0, "avg_reward": 0.5}
    again = {"epoch": 1, "step": 1, "avg_reward": 0.7, "rewards": {"a": [0.7]}}
    lines: list[dict[str, Any]] = [
        {"event": "validated", "entry": entry},
        {"event": "best", "step": 1, "reward": 0.7, "path": None},
        {"event": "remeasured", "entry": again},
    ]
    (tmp_path / "journal.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with Journal(tmp_path / "journal.jsonl") as kept:
        state = fold(events.read(kept), CurriculumConfig())
    assert state.remeasured[1]["avg_reward"] == 0.7
    assert gain_of(state) is None
