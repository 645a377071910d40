"""Alarms: the causes that verdicts name, from the step where each begins to hold to the one where it ends.

    verdict of the step before ─┐
                                ├─► began, ended ──► `alarms` of the step's line ──► alarms.jsonl
    verdict of the step ────────┘

The journal keeps them in the line of their step, so a resumed run can rewrite alarms.jsonl after a crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from insitu.harness.files.metrics import AlarmLine, StepLine
from insitu.harness.verdicts.measures import measure
from insitu.harness.verdicts.rules import RULES, Rule
from insitu.harness.verdicts.run_settings import RunSettings

RULE_BY_NAME = {rule.name: rule for rule in RULES}


class _Gap(str):
    """A missing word; it takes any format."""

    __slots__ = ()

    def __format__(self, format_spec: str) -> str:
        return "?"


class _Words(dict[str, object]):
    """Words for a sentence; a word that is not known leaves a gap instead of an error."""

    def __missing__(self, key: str) -> str:
        return _Gap(key)


@dataclass(frozen=True, slots=True)
class ToldCause:
    """A cause in words."""

    sentence: str
    setting: str
    """The setting to try."""


def tell(rule: Rule, lines: Sequence[StepLine], settings: RunSettings) -> ToldCause:
    """Put a cause into words, with the figures after the last of these lines."""
    found = measure(lines, settings)
    words = _Words({**found.words, **found.figures})
    return ToldCause(rule.sentence.format_map(words), rule.setting.format_map(words))


def with_alarms(
    steps: Sequence[StepLine], num_before_change: int, line: StepLine, settings: RunSettings
) -> StepLine:
    """Return the judged line of a step with the alarms that begin or end with it, if any.

    `steps` are those before; the first `num_before_change` had other inputs, and the verdict leaves them out.
    An alarm that ends is told with the figures of the last step where it held.
    """
    before, now = causes(steps[-1]) if steps else [], causes(line)
    comparable = steps[num_before_change:]
    held, holds = comparable or steps, [*comparable, line]
    alarms = [
        *(
            _alarm("began", name, line, tell(RULE_BY_NAME[name], holds, settings))
            for name in now
            if name not in before
        ),
        *(
            _alarm("ended", name, line, tell(RULE_BY_NAME[name], held, settings))
            for name in before
            if name not in now
        ),
    ]
    return {**line, "alarms": alarms} if alarms else line


def causes(line: StepLine) -> list[str]:
    """Return the causes that a line names, without those of another release."""
    verdict = line.get("verdict")
    return [cause for cause in verdict["causes"] if cause in RULE_BY_NAME] if verdict else []


def _alarm(event: Literal["began", "ended"], cause: str, line: StepLine, told: ToldCause) -> AlarmLine:
    return {
        "event": event,
        "cause": cause,
        "epoch": line["epoch"],
        "step_of_epoch": line.get("step_of_epoch", 0),
        "step": line["step"],
        "timestamp": line["timestamp"],
        "sentence": told.sentence,
        "setting": told.setting,
    }
