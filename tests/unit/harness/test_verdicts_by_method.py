"""The verdict under other methods: rules about spread, sampling or rewards are silent where none is used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from insitu.harness.files.metrics import StepLine
from insitu.harness.verdicts.rules import RULES
from insitu.types import Method
from tests.support.recorded_runs import SETTINGS, judged
from tests.unit.harness.test_verdicts import PROVOKED, causes, changed, sentence

SILENT: dict[Method, set[str]] = {
    "sft": {
        *("mismatch", "context_overflow", "low_temperature", "constant_reward", "solved", "no_spread"),
        *("entropy_collapse", "unusual_temperature", "narrowed_sampling", "too_few_updates"),
        *("stale_rollouts", "small_updates"),
    },
    "dpo": {
        *("mismatch", "entropy_collapse", "unusual_temperature", "narrowed_sampling", "too_few_updates"),
        *("stale_rollouts", "small_updates"),
    },
    "distill": {
        *("context_overflow", "low_temperature", "constant_reward", "solved", "no_spread"),
        "entropy_collapse",
    },
    "grpo": set(),
}


def given_run(losses: list[float], **settings: Any) -> list[StepLine]:
    """A run from demonstrations: every reward is 1, only the loss tells."""
    lines: list[dict[str, Any]] = [
        {
            "epoch": 0,
            "step": number + 1,
            "avg_reward": 1.0,
            "min_reward": 1.0,
            "max_reward": 1.0,
            "num_rewarded": 16,
            "filtered_num_trajectories": 16,
            "filtered_avg_reward": 1.0,
            "account": {"total": 16, "trained": 16, "truncated": 0, "dropped": {}, "endings": {}},
            "training": {"loss": loss, "updated": 1.0, "entropy": loss},
        }
        for number, loss in enumerate(losses)
    ]
    return judged(cast("list[StepLine]", lines), replace(SETTINGS, method="sft", given=True, **settings))


@pytest.mark.parametrize("method", SILENT)
def test_every_rule_speaks_only_where_it_means_trouble(method: Method) -> None:
    assert {rule.name for rule in RULES if method not in rule.methods} == SILENT[method]
    for name in PROVOKED:
        lines = judged(changed("small-0", PROVOKED[name][0]), replace(SETTINGS, method=method))
        spoken = {cause for told in causes(lines) for cause in told}
        assert not spoken & SILENT[method], f"{name} under {method}"
        assert (name in spoken) == (name not in SILENT[method])


def test_demonstrations_are_judged_by_the_loss() -> None:
    lines = given_run([2.0 - 0.1 * number + 0.01 * (number % 2) for number in range(12)])
    assert lines[-1]["verdict"]["code"] == "learning"  # pyright: ignore
    assert causes(lines) == [[]] * 12
    assert sentence(lines).startswith("learning: training loss 1.11, falling by 0.1 ±")


def test_a_loss_that_rises_is_told() -> None:
    lines = given_run([1.0 + 0.1 * number + 0.01 * (number % 2) for number in range(12)])
    assert sentence(lines).startswith("getting worse: training loss 1.91, rising by 0.1 ±")


def test_a_loss_that_stays_is_told() -> None:
    lines = given_run([1.0 + 0.01 * (number % 3) for number in range(14)])
    assert sentence(lines).startswith("not learning: training loss 1.01, down by at most 0.0")
    assert "learning_rate" not in sentence(lines)


def test_a_loss_that_has_fallen_is_level() -> None:
    falling = [2.0 - 0.1 * number + 0.01 * (number % 2) for number in range(10)]
    lines = given_run(falling + [1.1 + 0.005 * (number % 2) for number in range(14)])
    assert "level: training loss 1.1, down from 1.9 at the start, and no longer falling" in sentence(lines)
