"""Measures: the figures that the rules of the verdict look at, computed from lines of steps.jsonl.

Shares and medians are over the latest steps. A figure that nothing measured is missing, and a rule that needs
it stays silent.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from insitu.harness.files.metrics import StepLine
from insitu.harness.verdicts.run_settings import RunSettings
from insitu.harness.verdicts.trend import Trend, fit
from insitu.types import Ending, Method

RECENT_STEPS = 5
"""Steps that shares and medians are taken over."""
_LEAST_WINDOW = 10
_ENTROPY_STEPS = 3
_FAILED, _EQUAL = "failed", "zero_variance"
"""Reasons in an account's `dropped`."""


@dataclass(frozen=True, slots=True)
class Measures:
    """The figures after a step."""

    num_steps: int
    num_updates: int
    figures: Mapping[str, float]
    """By name, for the conditions of the rules."""
    words: Mapping[str, str]
    """By name, for their sentences."""
    method: Method = "grpo"
    by_loss: bool = False
    """True if the run is judged by its training loss instead of the mean reward."""
    trend: Trend | None = None
    """Of the mean reward per update, or of the loss with its sign changed, so that up is better; over the
    latest half of the run and at least ten steps."""
    overall: Trend | None = None
    """The same over the whole run."""
    courses: Sequence[float] = field(default_factory=tuple[float, ...])
    """The mean reward or the loss of each step that has one."""


def measure(lines: Sequence[StepLine], settings: RunSettings) -> Measures:
    """Measure a run after the last of these lines."""
    recent = lines[-RECENT_STEPS:]
    figures: dict[str, float] = {"planned_updates": settings.planned_updates}
    words = settings.words()
    figures |= _rewards(lines, recent) | _shares(recent, words) | _training(lines, recent, words)
    points = _points(lines, _loss if settings.given else _reward)
    sign = -1 if settings.given else 1
    better = [(updates, sign * value) for updates, value in points]
    return Measures(
        num_steps=len(lines),
        num_updates=sum(map(_updated, lines)),
        figures=figures,
        words=words,
        method=settings.method,
        by_loss=settings.given,
        trend=fit(better[-max(_LEAST_WINDOW, len(points) // 2) :]),
        overall=fit(better),
        courses=[value for _, value in points],
    )


def _reward(line: StepLine) -> float | None:
    return line.get("avg_reward")


def _loss(line: StepLine) -> float | None:
    return (line.get("training") or {}).get("loss")


def _points(
    lines: Sequence[StepLine], value: Callable[[StepLine], float | None]
) -> list[tuple[float, float]]:
    """Return a figure of each step over the updates that its policy had."""
    points: list[tuple[float, float]] = []
    num_updates = 0
    for line in lines:
        if (found := value(line)) is not None:
            points.append((num_updates, found))
        num_updates += _updated(line)
    return points


def _updated(line: StepLine) -> bool:
    return bool(line.get("step")) and (line.get("training") or {}).get("updated") != 0


def _rewards(lines: Sequence[StepLine], recent: Sequence[StepLine]) -> dict[str, float]:
    lows = [low for line in lines if (low := line.get("min_reward")) is not None]
    highs = [high for line in lines if (high := line.get("max_reward")) is not None]
    counted = [
        (line, mean, line["num_rewarded"])
        for line in recent
        if (mean := line.get("avg_reward")) is not None and "num_rewarded" in line
    ]
    number = sum(count for _, _, count in counted)
    if not number:
        return {}
    low, high = min(lows), max(highs)
    total = sum(mean * count for _, mean, count in counted)
    found = {"num_rewarded": number, "reward": total / number, "reward_range": high - low}
    if high > low:
        found["reward_level"] = (total / number - low) / (high - low)
        rest = number - sum(line["filtered_num_trajectories"] for line, _, _ in counted)
        chosen = sum(
            (line["filtered_avg_reward"] or 0) * line["filtered_num_trajectories"] for line, _, _ in counted
        )
        if rest > 0:
            found["unused_level"] = ((total - chosen) / rest - low) / (high - low)
    return found


def _shares(recent: Sequence[StepLine], words: dict[str, str]) -> dict[str, float]:
    accounts = [line["account"] for line in recent if "account" in line]
    total = sum(account["total"] for account in accounts)
    if not total:
        return {}
    dropped, endings = Counter[str](), Counter[str]()
    for account in accounts:
        dropped.update(account["dropped"])
        endings.update(account["endings"])
    overflows = endings.pop(Ending.CONTEXT_OVERFLOW.value, 0)
    scored = total - dropped[_FAILED]
    found = {"overflow": overflows / total, "failed": (dropped[_FAILED] - overflows) / total}
    words["ending"] = max(
        sorted(endings), key=lambda name: endings[name], default=Ending.INFRASTRUCTURE.value
    )
    if scored:
        truncated = sum(line.get("num_truncated", 0) for line in recent)
        found |= {"equal": dropped[_EQUAL] / scored, "truncated": truncated / scored}
    return found


def _training(
    lines: Sequence[StepLine], recent: Sequence[StepLine], words: dict[str, str]
) -> dict[str, float]:
    found: dict[str, float] = {}
    trained = [training for line in recent if (training := line.get("training"))]
    told = [training for training in trained if training.get("probe/can_tell") != 0]
    medians = {
        "temperature": [line.get("temperature") for line in recent],
        "applied": [training.get("probe/applied") for training in told],
        "mismatch": [training.get("mismatch/kl") for training in trained],
        "loss": [training.get("loss") for training in trained],
    }
    for name, values in medians.items():
        if known := [value for value in values if value is not None]:
            found[name] = statistics.median(known)
    if "temperature" in found:
        found["temperature_gap"] = abs(found["temperature"] - 1)
    skipped = [bool(count) for training in trained if (count := training.get("skipped")) is not None]
    if skipped:
        found["skipped"] = sum(skipped) / len(skipped)
    entropies = [
        entropy for line in lines if (entropy := (line.get("training") or {}).get("entropy")) is not None
    ]
    if len(entropies) >= 2 * _ENTROPY_STEPS and (start := statistics.fmean(entropies[:_ENTROPY_STEPS])) > 0:
        found["entropy"] = statistics.fmean(entropies[-_ENTROPY_STEPS:]) / start
    return found | _narrowed(trained, words)


def _narrowed(trained: Sequence[Mapping[str, float | None]], words: dict[str, str]) -> dict[str, float]:
    """Return the share of trained calls with the most frequent sampling setting that narrows the choice."""
    counts: dict[str, float] = {}
    for training in trained:
        for name, count in training.items():
            if name.startswith("sampling/") and name.endswith("_calls") and name != "sampling/greedy_calls":
                setting = name.removeprefix("sampling/").removesuffix("_calls")
                counts[setting] = counts.get(setting, 0.0) + (count or 0.0)
    calls = sum(training.get("account/calls_trained") or 0 for training in trained)
    if not calls:
        return {}
    name, count = max(sorted(counts.items()), key=lambda found: found[1], default=("", 0))
    words["sampling"] = name
    return {"narrowed": count / calls}
