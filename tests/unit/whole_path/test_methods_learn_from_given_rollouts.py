"""Other methods than grpo, through the same command: given answers, pairs, recorded and single rollouts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from insitu.cli import cli
from insitu.errors import InsituError, InvalidRequest
from insitu.gateway_client import GatewayClient
from insitu.harness.dry_run import dry_run
from insitu.types import ModelCall
from insitu.wire.bodies import Demonstration
from tests.support.finetune_bench import (
    FinetuneBench,
    agent,
    by_generation,
    one_call,
    open_bench,
    position,
    rewards,
)
from tests.support.standin_engine import END, Behaviour, spell, spell_messages

RUNS: list[str] = []


async def counted(value: Any, context: Any) -> str:
    RUNS.append(context.rollout_id)
    return await one_call(value, context)


def question(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"{number}+1?"}


def answer(number: int) -> dict[str, Any]:
    return {"role": "assistant", "content": str(number + 1)}


def configure(bench: FinetuneBench, builder: dict[str, Any], method: str | None, /, **changes: Any) -> None:
    RUNS.clear()
    llms = changes.pop("llms", {})
    training = changes.pop("training", {}) | ({} if method is None else {"method": method})
    backend = {"training": training, "backend": {"name": changes.pop("run", "small")}}
    bench.project.configure(
        llms=llms,
        workflow=agent(counted),
        eval=changes.pop("eval", rewards(by_generation)),
        trajectory_builders={"groups": {"num_generations": 2}, "given": builder},
        trainer_adapters={"backend": backend},
        finetuning={"trajectory_builder": "given", "num_epochs": 1, **changes},
    )


def write(bench: FinetuneBench, rows: list[dict[str, Any]]) -> None:
    (bench.project.path / "train.json").write_text(json.dumps(rows))


def trained_calls(bench: FinetuneBench) -> list[list[ModelCall]]:
    """The calls of every trained rollout, as the trainer reads them."""
    records = bench.backend._records
    return [
        records.get(trajectory.call_ids)
        for group in bench.trained_groups()
        for trajectory in group.trajectories
    ]


def opened(tmp_path: Any, monkeypatch: Any, **options: Any) -> Any:
    return open_bench(tmp_path, monkeypatch, Behaviour(texts=["yes", "no"]), **options)


async def test_sft_learns_the_answers_of_every_row(tmp_path, monkeypatch):
    async with opened(tmp_path, monkeypatch) as bench:
        talk = [question(1), answer(1), question(2), answer(2)]
        write(bench, [{"id": "two", "messages": talk}, {"id": "one", "messages": talk[:2]}])
        configure(bench, {"_type": "demonstrations"}, "sft", num_epochs=2, groups_per_step=1)
        summary = await bench.run(validation_dataset="validation.json", validation_interval=2)
        assert (summary.outcome, summary.updates) == ("succeeded", 4), summary.reason
        made = trained_calls(bench)
        assert sorted(len(calls) for calls in made) == [1, 1, 2, 2]
        for calls in made:
            for number, call in enumerate(calls):
                assert call.prompt_ids == spell_messages(talk[: 2 * number + 1])
                assert call.output_ids == [*spell(str(number + 2)), END]
        lines = bench.project.lines("steps.jsonl")
        assert [line["account"]["trained"] for line in lines] == [1, 1, 1, 1]
        assert all(line["account"]["calls_confirmed"] for line in lines)
        assert {line["avg_reward"] for line in lines} == {1.0}
        assert RUNS
        assert all(".validation" in run for run in RUNS), "the agent runs for validation alone"
        stored = bench.records("epoch-0000-step-0000")
        assert [(each["ending"], each["reward"]) for each in stored] == [("completed", 1.0)]


async def test_a_dry_run_says_what_is_learnt(tmp_path, monkeypatch):
    async with opened(tmp_path, monkeypatch) as bench:
        write(bench, [DEMO])
        configure(bench, {"_type": "demonstrations"}, "sft")
        said: list[str] = []
        assert await dry_run(bench.loaded(), said.append), said
        assert "would run: 1 epochs of 1 given examples, and one update each (sft)" in said[-1]


async def test_demonstrations_are_rendered_with_the_settings_of_the_agents_calls(tmp_path, monkeypatch):
    sent: list[Demonstration] = []
    demonstrate = GatewayClient.demonstrate

    async def noted(self: GatewayClient, rollout_id: str, demonstration: Demonstration) -> Any:
        sent.append(demonstration)
        return await demonstrate(self, rollout_id, demonstration)

    monkeypatch.setattr(GatewayClient, "demonstrate", noted)
    async with opened(tmp_path, monkeypatch) as bench:
        tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
        write(bench, [DEMO | {"offered": tools}])
        llms = {"policy": {"chat_template_kwargs": {"enable_thinking": False}}}
        configure(bench, {"_type": "demonstrations", "tools_key": "offered"}, "sft", llms=llms)
        assert (await bench.run()).outcome == "succeeded"
        (demonstration,) = sent
        assert demonstration.chat_template_kwargs == {"enable_thinking": False}
        assert (demonstration.model, demonstration.tools) == ("small", tools)
        assert [call.tools for calls in trained_calls(bench) for call in calls] == [tools]


async def test_given_rollouts_are_shown_as_all_others(tmp_path, monkeypatch, capsys):
    async with opened(tmp_path, monkeypatch) as bench:
        write(bench, [DEMO])
        configure(bench, {"_type": "demonstrations"}, "sft")
        assert (await bench.run()).outcome == "succeeded"
        (rollout,) = bench.records()
        arguments = ["trajectories", "show", "output", rollout["rollout_id"]]
        await asyncio.to_thread(cli.main, arguments, standalone_mode=False)
        shown = capsys.readouterr().out
        assert "1+1?" in shown
        assert "2" in shown


async def test_an_interrupted_epoch_records_no_demonstration_twice(tmp_path, monkeypatch):
    async with opened(tmp_path, monkeypatch) as bench:
        write(bench, [{"id": str(n), "messages": [question(n), answer(n)]} for n in range(3)])
        configure(bench, {"_type": "demonstrations"}, "sft")
        bench.backend.fail_next_job = "the trainer was killed"
        assert (await bench.run()).outcome == "failed"
        first = [each["call_ids"] for each in bench.records()]
        summary = await bench.run()
        assert (summary.outcome, summary.updates) == ("succeeded", 1), summary.reason
        assert [each["call_ids"] for each in bench.records()] == first
        assert sorted(calls[0].id for calls in trained_calls(bench)) == sorted(ids[0] for ids in first)


async def test_dpo_learns_from_pairs(tmp_path, monkeypatch):
    async with opened(tmp_path, monkeypatch) as bench:
        rows = [
            {"id": "text", "messages": "2+3?", "chosen": "5", "rejected": "6"},
            {
                "id": "talk",
                "messages": [question(1), answer(1), question(2)],
                "chosen": answer(2),
                "rejected": {"role": "assistant", "content": "no"},
            },
        ]
        write(bench, rows)
        configure(bench, {"_type": "preference_pairs"}, "dpo", training={"dpo_beta": 0.2})
        summary = await bench.run()
        assert (summary.outcome, summary.updates) == ("succeeded", 1), summary.reason
        text, talk = bench.trained_groups()
        assert [each.reward for each in text.trajectories] == [1.0, 0.0]
        better, worse, *of_talk = trained_calls(bench)
        assert (
            better[0].prompt_ids
            == worse[0].prompt_ids
            == spell_messages([{"role": "user", "content": "2+3?"}])
        )
        assert (better[0].output_ids, worse[0].output_ids) == ([*spell("5"), END], [*spell("6"), END])
        # Only the last message is learnt; the answers before it are context.
        assert [[call.answer for call in calls] for calls in of_talk] == [
            [rows[1]["chosen"]],
            [rows[1]["rejected"]],
        ]
        assert len(talk.trajectories) == 2
        assert RUNS == []


async def test_recorded_rollouts_teach_another_run_their_own_tokens(tmp_path, monkeypatch):
    async with opened(tmp_path, monkeypatch) as bench:
        configure(bench, {"_type": "insitu", "num_generations": 3}, None, output_dir="first", num_epochs=2)
        assert (await bench.run()).outcome == "succeeded"
        sampled = {call.id: call for calls in trained_calls(bench) for call in calls}
        least = 0.03
        good = [
            trajectory
            for group in bench.trained_groups()
            for trajectory in group.trajectories
            if trajectory.reward >= least
        ]
        expected = sorted((sampled[t.call_ids[0]].output_ids, t.reward) for t in good)
        RUNS.clear()
        given = {"_type": "recorded_rollouts", "path": "first"}
        configure(bench, given, "sft", run="imitator", training={"min_reward": least}, groups_per_step=4)
        summary = await bench.run()
        assert (summary.outcome, summary.updates) == ("succeeded", 2), summary.reason
        assert RUNS == []
        ledger, records = bench.backend.ledger, bench.backend._records
        groups = [group for step in ledger.steps("imitator") for group in ledger.groups_of_job(step.job_id)]
        taught = [trajectory for group in groups for trajectory in group.trajectories]
        found = [(records.get(t.call_ids)[0], t.reward) for t in taught]
        assert sorted((call.output_ids, reward) for call, reward in found) == expected
        assert all(call.logprobs and call.source == "inline" for call, _ in found)
        accounts = [line["account"] for line in bench.project.lines("steps.jsonl")]
        assert sum(each["trained"] for each in accounts) == len(good)
        assert sum(each["dropped"].get("below_min_reward", 0) for each in accounts) == 18 - len(good)


@pytest.mark.parametrize("training", [{"method": "sft"}, {"method": "distill", "teacher": "small@0"}])
async def test_one_rollout_per_example_is_enough_where_none_is_compared(tmp_path, monkeypatch, training):
    async with opened(tmp_path, monkeypatch, num_examples=2) as bench:
        builder = {"_type": "insitu", "num_generations": 1}
        configure(bench, builder, training["method"], training=training)
        summary = await bench.run()
        assert (summary.outcome, summary.updates) == ("succeeded", 1), summary.reason
        assert [len(group.trajectories) for group in bench.trained_groups()] == [1, 1]


def only_the_second(item: Any) -> float:
    return float(position(item.rollout_id) == (1, 1))


def none(_item: Any) -> float:
    return 0.0


async def test_expert_iteration_trains_on_the_rollouts_above_the_threshold(tmp_path, monkeypatch):
    async with opened(tmp_path, monkeypatch, num_examples=2) as bench:
        builder = {"_type": "insitu", "num_generations": 2}
        training = {"min_reward": 0.5}
        configure(bench, builder, "sft", training=training, eval=rewards(only_the_second))
        summary = await bench.run()
        assert (summary.outcome, summary.updates) == ("succeeded", 1), summary.reason
        (group,) = bench.trained_groups()
        assert [position(each.rollout_id) for each in group.trajectories] == [(1, 1)]
        (line,) = bench.project.lines("steps.jsonl")
        assert line["account"]["line"].startswith("trained 1/4: 3 below-min-reward")


async def test_a_threshold_that_nobody_reaches_is_the_reason_told(tmp_path, monkeypatch):
    async with opened(tmp_path, monkeypatch, num_examples=2) as bench:
        builder = {"_type": "insitu", "num_generations": 2}
        configure(bench, builder, "sft", training={"min_reward": 0.5}, eval=rewards(none))
        summary = await bench.run()
        assert summary.reason == "no epoch trained anything: no rollout had a reward of 0.5 or more"


async def test_answers_that_cannot_be_rendered_end_the_run_with_the_reason(tmp_path, monkeypatch):
    async with opened(tmp_path, monkeypatch) as bench:
        write(bench, [{"id": "a", "messages": [answer(1)]}])
        configure(bench, {"_type": "demonstrations"}, "sft")
        summary = await bench.run()
        assert summary.outcome == "failed"
        assert "all 1 rollouts failed" in summary.reason
        assert "`messages[0]` is an answer to nothing" in summary.reason


DEMO = {"id": "a", "messages": [question(1), answer(1)]}
PAIR = {"id": "a", "messages": "1?", "chosen": "x", "rejected": "y"}
REFUSED: dict[str, tuple[dict[str, Any], str | None, dict[str, Any], dict[str, Any], str]] = {
    "demonstrations teach no grpo": (
        {"_type": "demonstrations"},
        None,
        {},
        DEMO,
        r"trainer_adapters\.backend\.training\.method is grpo, which cannot learn .*builders\.given.*sft can",
    ),
    "demonstrations need no teacher": (
        {"_type": "demonstrations"},
        "distill",
        {"training": {"teacher": "other@3"}},
        DEMO,
        "method is distill, which cannot learn",
    ),
    "pairs need a preference": ({"_type": "preference_pairs"}, "sft", {}, PAIR, "method is sft, .*dpo can"),
    "dpo needs two": (
        {"_type": "insitu", "num_generations": 1},
        "dpo",
        {},
        DEMO,
        "num_generations is 1: a rollout is judged",
    ),
    "nothing is refilled": (
        {"_type": "demonstrations"},
        "sft",
        {"max_refill": 2, "groups_per_step": 2},
        DEMO,
        r"finetuning\.max_refill is set, but under trainer_adapters\.backend\.training\.method: sft",
    ),
    "given rewards have no curriculum": (
        {"_type": "demonstrations"},
        "sft",
        {"curriculum_learning": {"enabled": True}},
        DEMO,
        "curriculum_learning is enabled, but the rollouts of",
    ),
    "nothing ends": (
        {"_type": "demonstrations"},
        "sft",
        {"ending_rewards": {"timeout": 0.0}},
        DEMO,
        "ending_rewards is set, but DemonstrationBuilder",
    ),
    "a column is missing": (
        {"_type": "demonstrations", "messages_key": "talk"},
        "sft",
        {},
        DEMO,
        r"(?s)no column `talk`; it has id, messages.*messages_key",
    ),
    "nothing to learn": (
        {"_type": "demonstrations"},
        "sft",
        {},
        {"id": "a", "messages": [question(1)]},
        "row a: `messages` has no assistant message",
    ),
    "no message": ({"_type": "demonstrations"}, "sft", {}, {"id": "a", "messages": "hi"}, "must be a list"),
    "no preference": (
        {"_type": "preference_pairs"},
        "dpo",
        {},
        PAIR | {"rejected": "x"},
        "row a: `chosen` and `rejected` are the same",
    ),
    "no answer": (
        {"_type": "preference_pairs"},
        "dpo",
        {},
        PAIR | {"chosen": ["x"]},
        "row a: `chosen` must be the text of an answer",
    ),
    "no earlier run": (
        {"_type": "recorded_rollouts", "path": "nowhere"},
        "sft",
        {},
        DEMO,
        "path is nowhere, where no run of `insitu finetune`",
    ),
    "a setting of another method": (
        {"_type": "insitu"},
        None,
        {"training": {"min_reward": 0.5}},
        DEMO,
        r"(?s)trainer_adapters\.backend\.training.*method grpo does not use min_reward",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_work_is_refused_before_anything_runs(tmp_path, monkeypatch, name):
    builder, method, changes, row, said = REFUSED[name]
    async with opened(tmp_path, monkeypatch) as bench:
        write(bench, [row])
        configure(bench, builder, method, **changes)
        with pytest.raises(InsituError, match=said):
            await bench.run()
        assert not bench.project.output.exists()
        lines: list[str] = []
        try:
            passed = await dry_run(bench.loaded(), lines.append)
        except InvalidRequest:
            passed = False
        assert not passed
        assert bench.backend.ledger.list_runs() == []


async def test_rollouts_of_another_model_are_refused(tmp_path, monkeypatch):
    async with opened(tmp_path, monkeypatch) as bench:
        configure(bench, {"_type": "insitu", "num_generations": 2}, None, output_dir="first")
        assert (await bench.run()).outcome == "succeeded"
        known = json.loads((bench.project.path / "first" / "config.json").read_text())
        known["config"]["trainer_adapters"]["backend"]["backend"]["base_model"] = "other"
        (bench.project.path / "first" / "config.json").write_text(json.dumps(known))
        configure(bench, {"_type": "recorded_rollouts", "path": "first"}, "sft")
        summary = await bench.run()
        assert "first has rollouts of 'other', but this run trains 'tiny'" in summary.reason
