"""Verdict: one sentence per step that says whether the run learns, or why not, with the setting to try.

    lines of steps.jsonl ──┐
                           ├─► Measures ──► State: trend of the rewards, held-out gain ──► Rules ──► Verdict
    validations so far ────┘

Everything is computed from these, and the verdict after a step is kept in its line. So a resumed run gives
the verdicts of an uninterrupted one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from insitu.harness.files.metrics import EpochLine, StepLine, ValidationEntry, VerdictFields
from insitu.harness.interfaces.progress import Progress
from insitu.harness.verdicts.held_out import HeldOut
from insitu.harness.verdicts.measures import LEAST_RISE, POWER, Measures, measure
from insitu.harness.verdicts.rules import RULES, Rule, State
from insitu.harness.verdicts.run_settings import RunSettings
from insitu.harness.verdicts.trend import Trend

LEAST_STEPS = 6
"""Steps before a rise can be told at all."""
ENOUGH_STEPS = 10
"""Steps without a rise before a run is said not to learn."""
CLEAR, STILL = 3.0, 1.3
"""Standard errors at which a trend begins to count, and still counts (1 in 10 by chance)."""
LARGE_RISE = 0.35
"""No drift is as large as this share of the range of rewards: for such a rise, steps count as independent."""
LATEST_CLEAR = 1.0
"""Standard errors that the latest half needs beyond the whole run: there are many halves to choose from."""
SURE = 2.05
"""Standard errors above the measured rise that a rise is ruled out with (1 in 50)."""
_MANY_LOOKS = 40
"""Steps from which the limits grow, because each verdict is one more chance to be wrong."""
_TRANSFERRED = 0.25
"""Share of the rise in training below which held-out rewards are said not to rise."""
_MOST_CAUSES = 2
_START_STEPS = 3


@dataclass(frozen=True, slots=True)
class _Words:
    """The words for the course of a figure."""

    better: str
    worse: str
    change: str
    """Of a figure that has become better."""


_REWARD = _Words("rising", "falling", "up")
_LOSS = _Words("falling", "rising", "down")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict after a step."""

    state: State
    sentence: str
    causes: list[str] = field(default_factory=list[str])
    """The names of the rules that apply, the most important first; the sentence tells two of them."""

    def to_dict(self) -> VerdictFields:
        """Serialize for the metrics files."""
        return {"code": self.state.value, "causes": self.causes, "sentence": self.sentence}


def judge(
    lines: Sequence[StepLine], settings: RunSettings, validations: Sequence[ValidationEntry] = ()
) -> Verdict:
    """Judge a run after the last of these lines; the line before has the verdict that hysteresis needs."""
    before = lines[-2].get("verdict") if len(lines) > 1 else None
    found = measure(lines, settings, validations)
    state = _state(found, None if before is None else before["code"])
    told_before = [] if before is None else before["causes"]
    causes = _causes(found, state, told_before)
    return Verdict(state, _sentence(found, state, causes), [rule.name for rule in causes])


def with_verdict(
    lines: Sequence[StepLine],
    line: StepLine,
    settings: RunSettings,
    validations: Sequence[ValidationEntry] = (),
) -> StepLine:
    """Return the line of a step with its verdict; `lines` are those before."""
    return {**line, "verdict": judge([*lines, line], settings, validations).to_dict()}


def show_verdict(line: EpochLine, progress: Progress) -> None:
    """Show the verdict of a step or an epoch, as a warning if something should be changed."""
    verdict = line.get("verdict")
    if verdict is not None:
        progress.verdict(verdict["sentence"], warning=needs_change(verdict))


def needs_change(verdict: VerdictFields) -> bool:
    """Return True if the verdict asks for a change of settings."""
    bad = verdict["code"] in (State.NOT_LEARNING, State.FALLING, State.OVERFITTING)
    return bad or any(name != "solved" for name in verdict["causes"])


def _state(found: Measures, before: str | None) -> State:
    if found.overall is None or len(found.courses) < LEAST_STEPS:
        return _without_trend(found)
    number = found.overall.num_points
    clear = math.sqrt(CLEAR**2 + 2 * math.log(max(1.0, number / _MANY_LOOKS)))
    overall, latest = _rise(found, found.overall), 0.0 if found.trend is None else found.trend.z
    rose = before in (State.LEARNING, State.LEVEL, State.OVERFITTING)
    undone = found.with_failures is not None and found.with_failures.z < STILL
    rises = overall >= clear or (latest >= clear + LATEST_CLEAR and not undone)
    large = found.overall.slope * number >= LARGE_RISE * found.scale and _plain_rise(found) >= clear
    if large or rises or (rose and overall >= STILL):
        if found.held_out is not None and _stays_behind(found.held_out, found.overall):
            return State.OVERFITTING
        return State.LEVEL if latest < STILL and _has_stopped(found) else State.LEARNING
    if overall <= -clear or latest <= -clear - LATEST_CLEAR or (before == State.FALLING and latest <= -STILL):
        return State.FALLING
    if _held_out_z(found) >= clear and overall > -STILL:
        return State.LEARNING  # before the rewards of training show it
    return _without_rise(found, found.overall)


def _without_trend(found: Measures) -> State:
    """Nothing ever moved, or it is too early to tell."""
    never = found.num_steps >= ENOUGH_STEPS and not any(found.courses)
    return State.NOT_LEARNING if never else State.TOO_EARLY


def _rise(found: Measures, overall: Trend) -> float:
    """Return the rise in standard errors; with failures at the lowest reward too, if there are any."""
    return overall.z if found.with_failures is None else min(overall.z, found.with_failures.z)


def _plain_rise(found: Measures) -> float:
    trends = [trend.plain_z for trend in (found.overall, found.with_failures) if trend is not None]
    return min(trends, default=0.0)


def _held_out_z(found: Measures) -> float:
    return 0.0 if found.held_out is None else found.held_out.z


def _has_stopped(found: Measures) -> bool:
    """Return True if the latest half certainly rises less than half as fast as the whole run."""
    assert found.overall is not None
    if found.trend is None or found.trend.num_points == found.overall.num_points:
        return False
    return found.trend.slope + STILL * found.trend.error < found.overall.slope / 2


def _stays_behind(held_out: HeldOut, training: Trend) -> bool:
    """Return True if held-out rewards certainly rise less than a quarter as much as those of training."""
    rise = training.slope * training.num_points
    return held_out.num_validations > 2 and held_out.rise + SURE * held_out.error < _TRANSFERRED * rise


def _without_rise(found: Measures, overall: Trend) -> State:
    """It is not learning only if a rise that matters would have been seen."""
    if found.num_steps < ENOUGH_STEPS:
        return State.TOO_EARLY
    planned, least = found.figures["planned_updates"], LEAST_RISE * found.scale
    can_tell = POWER * overall.error * planned <= least
    ruled_out = (overall.slope + SURE * overall.error) * planned <= least
    return State.NOT_LEARNING if can_tell and ruled_out else State.TOO_EARLY


def _causes(found: Measures, state: State, before: Sequence[str]) -> list[Rule]:
    causes = [
        rule
        for rule in RULES
        if rule.applies(state, found.num_steps, found.figures, found.method, speaking=rule.name in before)
    ]
    covered = {name for rule in causes for name in rule.covers}
    return [rule for rule in causes if rule.name not in covered]


def _sentence(found: Measures, state: State, causes: Sequence[Rule]) -> str:
    lead = _lead(found, state)
    if not causes:
        return f"{lead}{_general_advice(found, state)}"
    first, *others = (_told(rule, found) for rule in causes[:_MOST_CAUSES])
    return ". ".join([lead, first[0].upper() + first[1:], *(f"Also, {other}" for other in others)])


def _told(rule: Rule, found: Measures) -> str:
    return f"{rule.sentence}: {rule.setting}".format_map({**found.words, **found.figures})


def _lead(found: Measures, state: State) -> str:
    name, words = ("training loss", _LOSS) if found.by_loss else ("mean reward", _REWARD)
    if state is State.TOO_EARLY:
        return f"too early to tell after {_count(found.num_steps, 'step')}{_when_known(found)}"
    figure = found.figures.get("loss" if found.by_loss else "reward")
    shown = f"no {name.split()[-1]}" if figure is None else f"{name} {figure:.3g}"
    if state is State.LEVEL:
        start = statistics.fmean(found.courses[:_START_STEPS])
        return f"level: {shown}, {words.change} from {start:.3g} at the start, and no longer {words.better}"
    if state is State.OVERFITTING:
        return _overfitting(found, shown)
    if found.trend is None or found.overall is None:
        updates, steps = _count(found.num_updates, "update"), _count(found.num_steps, "step")
        return f"not learning: {shown}, {updates} in {steps}"
    by_validations = state is State.LEARNING and found.overall.z < CLEAR and found.trend.z < CLEAR
    if by_validations and found.held_out is not None:
        rise, error = found.held_out.rise, found.held_out.error
        return f"learning: {shown}, held-out reward up by {rise:.2g} ± {error:.2g} since the start"
    trend = found.trend if abs(found.trend.z) > abs(found.overall.z) else found.overall
    slope, error = trend.slope, trend.error
    per = f"{abs(slope):.2g} ± {error:.2g} per update over {trend.num_points} steps"
    if state is State.LEARNING:
        return f"learning: {shown}, {words.better} by {per}"
    if state is State.FALLING:
        return f"getting worse: {shown}, {words.worse} by {per}"
    most = (found.overall.slope + SURE * found.overall.error) * found.overall.num_points
    steps = _count(found.num_steps, "step")
    return f"not learning: {shown}, {words.change} by at most {max(0.0, most):.2g} in {steps}"


def _when_known(found: Measures) -> str:
    """Say when there will be a verdict, as far as the scatter tells."""
    if found.overall is None or found.num_steps < LEAST_STEPS or found.figures.get("planned_share", 0.0) < 1:
        return ""
    return f"; by step {max(found.figures['needed_updates'], found.num_steps + 1):.0f} it will be clear"


def _overfitting(found: Measures, shown: str) -> str:
    assert found.held_out is not None
    assert found.overall is not None
    rise, held_out = found.overall.slope * found.overall.num_points, found.held_out
    return (
        f"overfitting: {shown}, up by {rise:.2g} in training, and {held_out.rise:+.2g} ± "
        f"{held_out.error:.2g} on held-out examples: train on more examples, or stop and use the best "
        "checkpoint"
    )


def _general_advice(found: Measures, state: State) -> str:
    """Advise without a cause: nothing is doubled on a guess."""
    if state is State.NOT_LEARNING:
        directory = found.words["output_dir"]
        return f"; no cause shows in the metrics: read rollouts with `insitu trajectories list {directory}`"
    if state is State.FALLING:
        return f"; halve {found.words['training']}.learning_rate, and use the best checkpoint"
    return ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
