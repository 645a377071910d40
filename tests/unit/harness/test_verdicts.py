"""The verdict: every rule speaks when provoked and is silent in healthy runs; noise is no learning."""

from __future__ import annotations

import itertools
import random
import re
import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from insitu.harness.files.metrics import StepLine
from insitu.harness.interfaces.progress import Progress
from insitu.harness.loop.metrics import epoch_line
from insitu.harness.verdicts.rules import RULES, State
from insitu.harness.verdicts.trend import deviate, fit, step_levels
from insitu.harness.verdicts.verdict import judge, show_verdict, with_verdict
from tests.support.recorded_runs import SETTINGS, judged, read_run

HEALTHY = ("small-0", "small-1", "small-2")
DECISION = Path(__file__).resolve().parents[3] / "docs" / "decisions" / "0007-the-default-loss.md"
WORDS = {*SETTINGS.words(), "ending", "sampling", "reward", "needed_updates"}
Change = Callable[[dict[str, Any]], object]


def codes(lines: list[StepLine]) -> list[str]:
    return [line["verdict"]["code"] for line in lines]  # pyright: ignore


def causes(lines: list[StepLine]) -> list[list[str]]:
    return [line["verdict"]["causes"] for line in lines]  # pyright: ignore


def sentence(lines: list[StepLine]) -> str:
    return lines[-1]["verdict"]["sentence"]  # pyright: ignore


def num_changes(values: list[Any]) -> int:
    return sum(before != after for before, after in itertools.pairwise(values))


def changed(name: str, change: Change) -> list[StepLine]:
    """A recorded run whose steps were altered, judged."""
    lines: list[Any] = read_run(name)
    for line in lines:
        change(line)
    return judged(lines)


# Healthy runs


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_learns_and_no_rule_speaks(name: str) -> None:
    lines = judged(read_run(name))
    assert causes(lines) == [[]] * len(lines)
    assert codes(lines)[-1] in (State.LEARNING, State.LEVEL)
    assert State.LEARNING in codes(lines)
    assert not {State.NOT_LEARNING, State.FALLING} & set(codes(lines))
    assert num_changes(codes(lines)) <= 2
    assert "per update over" in sentence(lines) or "no longer rising" in sentence(lines)


def test_published_curves_of_a_real_model_are_never_blamed() -> None:
    """SmolLM2-135M on a real engine: the mean rewards that decision 0007 lists."""
    rows = re.findall(r"\| ((?:0\.\d\d ){5,}0\.\d\d) \|", DECISION.read_text())
    assert len(rows) == 10
    for row in rows:
        template = read_run("small-0")[0]
        lines = judged([{**template, "avg_reward": float(reward)} for reward in row.split()])  # pyright: ignore
        assert causes(lines) == [[]] * len(lines)
        assert set(codes(lines)) <= {State.TOO_EARLY, State.LEARNING}
        assert codes(lines)[-1] == State.LEARNING or len(lines) < 8


def test_a_run_that_does_not_learn_is_told_so_with_the_setting_to_try() -> None:
    lines = judged(read_run("slow"))
    assert set(codes(lines)) == {State.TOO_EARLY, State.NOT_LEARNING}
    assert num_changes(codes(lines)) == 1
    assert "no cause shows in the metrics: read rollouts with `insitu trajectories list output`" in sentence(
        lines
    )
    assert "learning_rate" not in sentence(lines), "no rate is changed without a cause"


def test_a_run_that_gets_worse_is_told_so() -> None:
    rewards = [line["avg_reward"] for line in read_run("small-1")]
    lines: list[Any] = read_run("small-1")
    for line, reward in zip(lines, reversed(rewards), strict=True):
        line["avg_reward"] = reward
    found = judged(lines)
    assert codes(found)[-1] == State.FALLING
    assert "halve trainer_adapters.backend.training.learning_rate" in sentence(found)


# Every rule


def flat(line: dict[str, Any]) -> None:
    """No step is better than the first."""
    line["avg_reward"] = line["filtered_avg_reward"] = 0.05 + line["epoch"] % 3 / 100


def figures(**training: float) -> Change:
    return lambda line: (
        flat(line),
        line["training"].update({k.replace("__", "/"): v for k, v in training.items()}),
    )


def equal(level: float) -> Change:
    def change(line: dict[str, Any]) -> None:
        line["account"]["dropped"] = {"zero_variance": 56}
        line["filtered_num_trajectories"], line["filtered_avg_reward"] = 8, level
        line["avg_reward"] = level + line["epoch"] % 3 / 1000
        line["min_reward"], line["max_reward"] = 0.0, 1.0

    return change


def failed(ending: str) -> Change:
    return lambda line: line["account"].update(dropped={"failed": 40}, endings={ending: 40})


def cold(line: dict[str, Any]) -> None:
    equal(0.02)(line)
    line["temperature"] = 0.0


def constant(line: dict[str, Any]) -> None:
    line["avg_reward"] = line["min_reward"] = line["max_reward"] = 0.0
    line["filtered_num_trajectories"], line["filtered_avg_reward"], line["step"] = 0, None, None
    line["account"]["dropped"] = {"zero_variance": 64}


def collapsed(line: dict[str, Any]) -> None:
    flat(line)
    line["training"]["entropy"] /= 1 if line["epoch"] < 6 else 10


PROVOKED: dict[str, tuple[Change, str]] = {
    "updates_skipped": (figures(skipped=1.0, updated=0.0), "100% of the latest updates were skipped"),
    "not_arriving": (figures(probe__applied=0.09), "Only 9% of what training changes reaches the model"),
    "mismatch": (figures(mismatch__kl=0.08), "mismatch/kl 0.08"),
    "stale_rollouts": (
        figures(mismatch__fresh_kl=0.001, mismatch__stale_kl=0.05), "mismatch/stale_kl 0.05"
    ),
    "small_updates": (figures(probe__update=0.0005), "double trainer_adapters.backend.training"),
    "all_truncated": (lambda line: (flat(line), line.update(num_truncated=62)), "97% of the rollouts"),
    "context_overflow": (failed("context_overflow"), "larger --max-seq-length"),
    "failed_rollouts": (failed("timeout"), "insitu trajectories list output --ending timeout"),
    "low_temperature": (cold, "set llms.adder.temperature to 1"),
    "constant_reward": (constant, "check eval.evaluators.exact on a few rollouts"),
    "solved": (equal(0.98), "solved every time: stop here"),
    "no_spread": (equal(0.02), "raise trajectory_builders.groups.num_generations"),
    "truncated": (lambda line: (flat(line), line.update(num_truncated=40)), "raise llms.adder.max_tokens"),
    "entropy_collapse": (collapsed, "trainer_adapters.backend.training.entropy_bonus to 0.001"),
    "unusual_temperature": (lambda line: (flat(line), line.update(temperature=1.6)), "temperature 1.6"),
    "narrowed_sampling": (
        figures(sampling__top_p_calls=64.0, account__calls_trained=64.0), "remove top_p from llms.adder"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROVOKED)
def test_a_rule_speaks_when_provoked_and_alone(name: str) -> None:
    change, text = PROVOKED[name]
    lines = changed("small-0", change)
    assert causes(lines)[-1] == [name]
    assert text in sentence(lines)
    assert num_changes(causes(lines)) <= 1


def test_a_run_of_few_updates_is_told_at_once() -> None:
    lines = judged(read_run("small-0")[:2], replace(SETTINGS, planned_updates=3))
    assert causes(lines) == [["too_few_updates"]] * 2
    assert sentence(lines) == (
        "too early to tell after 2 steps. The whole run is planned for 3 updates, and it takes about 10 to "
        "tell a rise from chance: raise finetuning.num_epochs, or lower finetuning.groups_per_step"
    )


def test_every_rule_is_provoked() -> None:
    assert {*PROVOKED, "too_few_updates"} == {rule.name for rule in RULES}


def test_a_recorded_collapse_is_told() -> None:
    lines = judged(read_run("collapse"))
    assert causes(lines)[-1] == ["entropy_collapse"]
    assert num_changes(causes(lines)) == 1
    assert sentence(lines).startswith("level: mean reward 0.28")


def test_the_most_important_cause_comes_first_and_two_are_told() -> None:
    def change(line: dict[str, Any]) -> None:
        flat(line)
        line["training"].update({"mismatch/kl": 0.08, "probe/applied": 0.2})
        line["num_truncated"] = 40

    lines = changed("small-0", change)
    assert causes(lines)[-1] == ["not_arriving", "mismatch", "truncated"]
    assert ". Only 20% of what" in sentence(lines)
    assert ". Also, the model that answers" in sentence(lines)
    assert "cut off" not in sentence(lines)


@pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])
def test_a_sentence_names_only_figures_that_its_rule_has(rule: Any) -> None:
    named = {name for _, name, _, _ in string.Formatter().parse(rule.sentence + rule.setting) if name}
    assert named <= WORDS | {condition.figure for condition in rule.conditions} | {"temperature"}
    for condition in rule.conditions:
        assert (condition.release >= condition.limit) == (condition.sign == "<") or (
            condition.release == condition.limit
        ), condition


# Flicker and noise


def test_a_figure_around_its_limit_does_not_flicker() -> None:
    values = [0.45, 0.55, 0.48, 0.52, 0.49, 0.53] * 5

    def change(line: dict[str, Any]) -> None:
        line["training"]["probe/applied"] = values[line["epoch"]]

    told = causes(changed("small-0", change))
    assert told[-1] == ["not_arriving"]
    assert num_changes(told) == 1


def test_a_rule_ends_when_its_cause_is_gone() -> None:
    lines: list[Any] = read_run("small-0")
    for line in lines[:8]:
        line["training"]["probe/applied"] = 0.1
    told = causes(judged(lines))
    assert told[7] == ["not_arriving"]
    assert told[-1] == []
    assert num_changes(told) == 2


def test_noise_is_not_called_learning() -> None:
    template, wrong, changes = read_run("slow")[0], 0, []
    for seed in range(30):
        generator = random.Random(seed)
        lines = [{**template, "epoch": n, "avg_reward": 0.3 + generator.gauss(0, 0.05)} for n in range(40)]
        found = codes(judged(lines))  # pyright: ignore
        wrong += State.LEARNING in found
        changes.append(num_changes(found))
    assert wrong <= 1
    assert sum(changes) / len(changes) <= 1.5


def test_a_slow_rise_in_noise_is_found() -> None:
    template, found = read_run("slow")[0], 0
    for seed in range(10):
        generator = random.Random(seed)
        lines = [
            {**template, "epoch": n, "avg_reward": 0.3 + 0.005 * n + generator.gauss(0, 0.04)}
            for n in range(40)
        ]
        found += State.LEARNING in codes(judged(lines))  # pyright: ignore
    assert found >= 9


def test_few_points_need_a_clearer_trend() -> None:
    # t = 3.355 has the probability of z = 2.576 at 8 degrees of freedom.
    assert deviate(3.355, 8) == pytest.approx(2.576, abs=0.01)
    points = [(float(x), x + 1.0 * (-1) ** x) for x in range(10)]
    trend = fit(points)
    assert trend is not None
    assert trend.z < trend.slope / trend.error
    assert fit(points[:3]) is None
    assert fit([(1.0, 0.5)] * 8) is None
    flat_trend = fit([(float(x), 0.3) for x in range(8)])
    assert flat_trend is not None
    assert flat_trend.z == 0.0


# What the examples differ by, failures, validations


def test_what_examples_differ_by_is_taken_away_from_the_second_pass_on() -> None:
    easy, hard = {"a": 0.9, "b": 0.8}, {"c": 0.2, "d": 0.1}
    assert step_levels([easy, hard]) == pytest.approx([0.85, 0.15]), "nothing comes twice"
    levels = step_levels([easy, hard, {"a": 1.0, "c": 0.3}, {"b": 0.9, "d": 0.2}])
    assert max(levels[:2]) - min(levels[:2]) < 0.3, "0.7 between the means"
    assert sum(levels[2:]) - sum(levels[:2]) == pytest.approx(0.2, abs=0.02)


def groups_of(rewards: list[dict[str, float]], failed: Callable[[int], int] = lambda _: 0) -> list[StepLine]:
    """Lines of a run whose steps have these mean rewards by example."""
    template: Any = read_run("small-0")[0]
    return [
        {
            **template,
            "step": number + 1,
            "min_reward": 0.0,
            "max_reward": 1.0,
            "avg_reward": sum(group.values()) / len(group),
            "group_rewards": {
                name: {"mean": mean, "num_rewarded": 8 - failed(number), "num_failed": failed(number)}
                for name, mean in group.items()
            },
        }
        for number, group in enumerate(rewards)
    ]


def passes_of(rise: float, steps: int = 26) -> list[dict[str, float]]:
    """A rise that drowns in what examples differ by, until they come again."""
    generator = random.Random(1)
    ease = {f"{index}": generator.random() * 0.7 for index in range(16)}
    order = [name for _ in range(steps) for name in generator.sample(list(ease), 16)]
    return [
        {
            name: ease[name] + rise * step / steps + generator.gauss(0, 0.03)
            for name in order[4 * step : 4 * step + 4]
        }
        for step in range(steps)
    ]


def test_a_rise_that_only_a_second_pass_shows_is_found() -> None:
    lines = groups_of(passes_of(0.15))
    assert State.LEARNING in codes(judged(lines))
    raw: list[Any] = [{key: value for key, value in line.items() if key != "group_rewards"} for line in lines]
    assert State.LEARNING not in codes(judged(raw))


def test_a_rise_by_failing_on_what_is_hard_is_not_learning() -> None:
    def growing(step: int) -> int:
        return min(6, step // 4)

    assert State.LEARNING in codes(judged(groups_of(passes_of(0.15))))
    assert State.LEARNING not in codes(judged(groups_of(passes_of(0.15), growing)))


def validation(step: int, level: float) -> Any:
    generator = random.Random(step)
    rewards = {f"{index}": [level + index / 100 + generator.gauss(0, 0.01)] for index in range(24)}
    return {"epoch": 0, "step": step, "avg_reward": level, "rewards": rewards, "failed": {}}


def test_held_out_rewards_that_do_not_follow_are_told() -> None:
    lines, done = groups_of(passes_of(0.3)), []
    behind = [validation(0, 0.3), validation(8, 0.3), validation(16, 0.31)]
    for line in lines:
        done.append(with_verdict(done, line, SETTINGS, behind))
    assert done[-1]["verdict"]["code"] == State.OVERFITTING
    assert "on held-out examples: train on more examples" in done[-1]["verdict"]["sentence"]
    following = [validation(0, 0.3), validation(8, 0.4), validation(16, 0.5)]
    assert judge(done, SETTINGS, following).state is State.LEARNING


def test_a_gain_on_held_out_examples_is_learning_before_the_trend_shows_it() -> None:
    lines = groups_of(passes_of(0.02, steps=12))
    assert codes(judged(lines))[-1] == State.TOO_EARLY
    found = judge(judged(lines), SETTINGS, [validation(0, 0.3), validation(12, 0.4)])
    assert found.state is State.LEARNING
    assert "held-out reward up by 0.1" in found.sentence


# Files


def test_verdicts_depend_on_the_lines_alone() -> None:
    whole = judged(read_run("collapse"))
    again = judged(whole[:9])
    for line in read_run("collapse")[9:]:
        again = [*again, *judged([*again, line])[-1:]]
    assert again == whole


def test_lines_of_earlier_releases_are_judged_without_their_missing_figures() -> None:
    lines: list[Any] = [
        {name: line.get(name) for name in ("epoch", "step", "avg_reward")} for line in read_run("small-1")
    ]
    found = judged(lines)
    assert codes(found)[-1] == State.LEARNING
    assert causes(found) == [[]] * len(found)


def test_a_step_without_any_reward_is_judged() -> None:
    lines: list[Any] = read_run("small-0")
    for line in lines:
        line["avg_reward"] = line["min_reward"] = line["max_reward"] = None
        line["num_rewarded"] = 0
    assert codes(judged(lines))[-1] == State.NOT_LEARNING


def test_an_epoch_has_the_verdict_of_its_last_step() -> None:
    lines: list[Any] = judged(read_run("small-0"))[:2]
    more = {
        "timestamp": "",
        "run_id": "",
        "num_trajectories": 64,
        "num_groups": 8,
        "curriculum_percentile": 1.0,
    }
    more |= {"filtered_num_groups": 4, "filtered_min_reward": 0.0, "filtered_max_reward": 1.0}
    full = [{**line, **more, "curriculum_state": {}} for line in lines]
    assert epoch_line(full).get("verdict") == lines[-1]["verdict"]  # pyright: ignore


def test_what_should_be_changed_is_shown_as_a_warning() -> None:
    shown: list[tuple[str, bool]] = []

    class Listener(Progress):
        def verdict(self, sentence: str, *, warning: bool) -> None:
            shown.append((sentence, warning))

    for name in ("small-0", "collapse", "slow"):
        show_verdict(judged(read_run(name))[-1], Listener())
    show_verdict({"epoch": 0}, Listener())  # pyright: ignore
    assert [warning for _, warning in shown] == [False, True, True]
