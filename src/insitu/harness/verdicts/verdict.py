"""Verdict: one sentence per step that says whether the run learns, or why not, with the setting to try.

    lines of steps.jsonl ──► Measures ──► State, by the trend of the rewards ──► Rules ──► Verdict

Everything is computed from the lines, and the verdict after a step is kept in its line. So a resumed run
gives the verdicts of an uninterrupted one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from insitu.harness.files.metrics import EpochLine, StepLine, VerdictFields
from insitu.harness.interfaces.progress import Progress
from insitu.harness.verdicts.measures import Measures, measure
from insitu.harness.verdicts.rules import RULES, Rule, State
from insitu.harness.verdicts.run_settings import RunSettings

LEAST_STEPS = 5
"""Steps before a rise can be told at all."""
ENOUGH_STEPS = 10
"""Steps without a rise before a run is said not to learn."""
CLEAR, STILL = 3.3, 1.3
"""Standard errors at which a trend begins to count (1 in 2,000 by chance), and still counts (1 in 10)."""
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


def judge(lines: Sequence[StepLine], settings: RunSettings) -> Verdict:
    """Judge a run after the last of these lines; the line before has the verdict that hysteresis needs."""
    before = lines[-2].get("verdict") if len(lines) > 1 else None
    found = measure(lines, settings)
    state = _state(found, None if before is None else before["code"])
    told_before = [] if before is None else before["causes"]
    causes = _causes(found, state, told_before)
    return Verdict(state, _sentence(found, state, causes), [rule.name for rule in causes])


def with_verdict(lines: Sequence[StepLine], line: StepLine, settings: RunSettings) -> StepLine:
    """Return the line of a step with its verdict; `lines` are those before."""
    return {**line, "verdict": judge([*lines, line], settings).to_dict()}


def show_verdict(line: EpochLine, progress: Progress) -> None:
    """Show the verdict of a step or an epoch, as a warning if something should be changed."""
    verdict = line.get("verdict")
    if verdict is not None:
        progress.verdict(verdict["sentence"], warning=needs_change(verdict))


def needs_change(verdict: VerdictFields) -> bool:
    """Return True if the verdict asks for a change of settings."""
    bad = verdict["code"] in (State.NOT_LEARNING, State.FALLING)
    return bad or any(name != "solved" for name in verdict["causes"])


def _state(found: Measures, before: str | None) -> State:
    trend = 0.0 if found.trend is None else found.trend.z
    overall = 0.0 if found.overall is None else found.overall.z
    if len(found.courses) >= LEAST_STEPS:
        # A slow rise shows over the whole run first; a run that has levelled off must rise clearly again.
        slow = overall >= CLEAR and before != State.LEVEL
        if trend >= CLEAR or (trend >= STILL and (slow or before == State.LEARNING)):
            return State.LEARNING
        if trend <= -CLEAR or (trend <= -STILL and before == State.FALLING):
            return State.FALLING
        if overall >= CLEAR or (overall >= STILL and before in (State.LEARNING, State.LEVEL)):
            return State.LEVEL
    hopeful = overall >= STILL and before in (None, State.TOO_EARLY)
    return State.TOO_EARLY if found.num_steps < ENOUGH_STEPS or hopeful else State.NOT_LEARNING


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
        unclear = f", the {name} may be {words.better}" if found.num_steps >= ENOUGH_STEPS else ""
        return f"too early to tell after {_count(found.num_steps, 'step')}{unclear}"
    figure = found.figures.get("loss" if found.by_loss else "reward")
    shown = f"no {name.split()[-1]}" if figure is None else f"{name} {figure:.3g}"
    if state is State.LEVEL:
        start = statistics.fmean(found.courses[:_START_STEPS])
        return f"level: {shown}, {words.change} from {start:.3g} at the start, and no longer {words.better}"
    if found.trend is None:
        updates, steps = _count(found.num_updates, "update"), _count(found.num_steps, "step")
        return f"not learning: {shown}, {updates} in {steps}"
    slope, error = found.trend.slope, found.trend.error
    per = f"{abs(slope):.2g} ± {error:.2g} per update over {found.trend.num_points} steps"
    if state is State.LEARNING:
        return f"learning: {shown}, {words.better} by {per}"
    if state is State.FALLING:
        return f"getting worse: {shown}, {words.worse} by {per}"
    slope = -slope if found.by_loss else slope
    return f"not learning yet: {shown}, no clear change ({slope:+.2g} ± {error:.2g} per update)"


def _general_advice(found: Measures, state: State) -> str:
    rate = f"{found.words['training']}.learning_rate"
    if state is State.NOT_LEARNING:
        return f"; try twice the {rate}" + ("" if found.by_loss else ", or more rollouts per update")
    if state is State.FALLING:
        return f"; halve {rate}, and use the best checkpoint"
    return ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
