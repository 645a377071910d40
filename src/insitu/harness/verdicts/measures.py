"""Measures: the figures that the rules of the verdict look at, computed from lines of steps.jsonl.

Shares and medians are over the latest steps. A figure that nothing measured is missing, and a rule that needs
it stays silent.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from insitu.harness.files.metrics import StepLine, ValidationEntry
from insitu.harness.verdicts.held_out import HeldOut, measure_held_out
from insitu.harness.verdicts.run_settings import RunSettings
from insitu.harness.verdicts.trend import Trend, fit, step_levels
from insitu.types import Ending, Method

RECENT_STEPS = 5
"""Steps that shares and medians are taken over."""
LEAST_RISE = 0.15
"""Rise over the planned updates, as a share of the range of rewards, that a run without one is told from."""
POWER = 3.0
"""Standard errors that fit into such a rise before its absence is said."""
_LEAST_WINDOW = 10
_LEAST_PLANNED = 10
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
    with_failures: Trend | None = None
    """The overall trend with failures at the lowest reward; None if nothing failed through the policy."""
    held_out: HeldOut | None = None
    """None before the second validation."""
    scale: float = 0.0
    """The range of the rewards so far, or the loss at the start: a rise counts in relation to it."""
    courses: Sequence[float] = field(default_factory=tuple[float, ...])
    """The mean reward or the loss of each step that has one."""


def measure(
    lines: Sequence[StepLine], settings: RunSettings, validations: Sequence[ValidationEntry] = ()
) -> Measures:
    """Measure a run after the last of these lines, with the validations so far."""
    recent = lines[-RECENT_STEPS:]
    figures: dict[str, float] = {"planned_updates": settings.planned_updates}
    words = settings.words()
    figures |= _rewards(lines, recent) | _shares(recent, words) | _training(lines, recent, words)
    course = _losses(lines) if settings.given else _reward_levels(lines)
    overall = course.trend()
    scale = abs(course.raw[0]) if settings.given and course.raw else figures.get("reward_range", 0.0)
    figures |= _needed_updates(overall, scale, settings.planned_updates)
    return Measures(
        num_steps=len(lines),
        num_updates=sum(map(_updated, lines)),
        figures=figures,
        words=words,
        method=settings.method,
        by_loss=settings.given,
        trend=course.trend(max(_LEAST_WINDOW, len(course.raw) // 2)),
        overall=overall,
        with_failures=None if settings.given else _with_failures(lines),
        held_out=measure_held_out(validations),
        scale=scale,
        courses=course.raw,
    )


@dataclass(frozen=True, slots=True)
class _Course:
    """A series of the run whose rise is good."""

    points: Sequence[tuple[float, float]]
    """Over the updates that the policy had."""
    weights: Sequence[float]
    raw: Sequence[float]
    """The values that people see."""

    def trend(self, latest: int = 0) -> Trend | None:
        """Fit a line to all of it, or to the latest points."""
        return fit(self.points[-latest:], self.weights[-latest:])


def _losses(lines: Sequence[StepLine]) -> _Course:
    known = [
        (updates, loss)
        for updates, line in _updates_before(lines)
        if (loss := (line.get("training") or {}).get("loss")) is not None
    ]
    points = [(updates, -loss) for updates, loss in known]
    return _Course(points, [1.0] * len(known), [loss for _, loss in known])


def _reward_levels(lines: Sequence[StepLine], floor: float | None = None) -> _Course:
    """Return the reward of each step, without what its examples differ by where the lines tell them apart."""
    known = [
        (updates, line) for updates, line in _updates_before(lines) if line.get("avg_reward") is not None
    ]
    raw = [line["avg_reward"] or 0.0 for _, line in known]
    of_groups = [_group_means(line, floor) for _, line in known]
    if not all(of_groups):
        return _Course([(x, y) for (x, _), y in zip(known, raw, strict=True)], [1.0] * len(raw), raw)
    levels = step_levels(of_groups) if of_groups else []
    points = [(x, level) for (x, _), level in zip(known, levels, strict=True)]
    return _Course(points, [float(len(groups)) for groups in of_groups], raw)


def _group_means(line: StepLine, floor: float | None) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, group in line.get("group_rewards", {}).items():
        mean, number, failed = group["mean"], group["num_rewarded"], group["num_failed"]
        if floor is not None and failed:
            found[name] = ((mean or 0.0) * number + floor * failed) / (number + failed)
        elif mean is not None:
            found[name] = mean
    return found


def _with_failures(lines: Sequence[StepLine]) -> Trend | None:
    """Return the trend with failures at the lowest reward of the run; None if none is the policy's."""
    lows = [low for line in lines if (low := line.get("min_reward")) is not None]
    groups = [group for line in lines for group in line.get("group_rewards", {}).values()]
    if not lows or not any(group["num_failed"] for group in groups):
        return None
    return _reward_levels(lines, min(lows)).trend()


def _updates_before(lines: Sequence[StepLine]) -> Iterator[tuple[float, StepLine]]:
    """Yield each line with the updates that its policy had."""
    num_updates = 0
    for line in lines:
        yield num_updates, line
        num_updates += _updated(line)


def _needed_updates(overall: Trend | None, scale: float, planned: int) -> dict[str, float]:
    """Return how many updates it takes to tell a rise from none, and the planned ones as a share of that.

    The error of a slope falls with the number of steps to the power of 1.5.
    """
    needed = float(_LEAST_PLANNED)
    if overall is not None and overall.num_points >= _LEAST_WINDOW and scale > 0:
        steps = overall.num_points
        of_all_planned = steps * (POWER * overall.error * planned / (LEAST_RISE * scale)) ** (2 / 3)
        alone = steps * (POWER * overall.error * steps / (LEAST_RISE * scale)) ** 2
        needed = max(needed, of_all_planned if of_all_planned <= planned else alone)
    return {"needed_updates": math.ceil(needed), "planned_share": planned / needed}


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
        "mismatch": [training.get("mismatch/fresh_kl", training.get("mismatch/kl")) for training in trained],
        "stale_mismatch": [training.get("mismatch/stale_kl") for training in trained],
        "update": [training.get("probe/update") for training in trained],
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
