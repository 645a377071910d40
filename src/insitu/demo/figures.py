"""Figures: the demo's result, read from the files of its run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from insitu.errors import InsituError
from insitu.harness.files.metrics import ValidationEntry
from insitu.harness.gains.measurement import plus_minus

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Figures:
    """Held-out rewards before and after, and the interval of their difference."""

    before: float
    before_error: float | None
    after: float
    after_error: float | None
    low: float
    high: float
    confidence: float
    step: int
    seconds: float

    def sentence(self) -> str:
        """Say what was gained."""
        before = plus_minus(self.before, self.before_error, 3)
        after = plus_minus(self.after, self.after_error, 3)
        return (
            f"Reward on questions it was not trained on: {before} before, {after} after {self.step} updates "
            f"({self.after - self.before:+.3f}, {100 * self.confidence:.4g} % interval "
            f"{self.low:+.3f} to {self.high:+.3f})."
        )


def read_figures(output: Path, seconds: float) -> Figures:
    """Read the first validation, and the best one as it was measured again."""
    history: list[ValidationEntry] = json.loads((output / "validation_history.json").read_text())
    start, best = history[0], history[-1]
    gain = best.get("gain")
    before, after = start["avg_reward"], best["avg_reward"]
    if before is None or after is None or gain is None or gain["low"] is None or gain["high"] is None:
        raise InsituError(
            f"the demo's run has no gain with an interval in {output / 'validation_history.json'}",
            hint=f"see what happened: insitu trajectories list {shlex.quote(str(output))}",
        )
    return Figures(
        before=before,
        before_error=start.get("standard_error"),
        after=after,
        after_error=best.get("standard_error"),
        low=gain["low"],
        high=gain["high"],
        confidence=gain["confidence"],
        step=best["step"],
        seconds=seconds,
    )


@dataclass(frozen=True, slots=True)
class Answers:
    """A held-out question with an answer before training and one after it."""

    question: str
    before: str
    after: str


def read_answers(output: Path, step: int) -> list[Answers]:
    """Return a few questions with the first answer of each model."""
    before = dict(_answers(output / "trajectories" / "validation-0000.jsonl"))
    after = dict(_answers(output / "trajectories" / f"remeasured-{step:06d}.jsonl"))
    both = [question for question in before if question in after]
    return [Answers(question, before[question], after[question]) for question in both[:_SHOWN]]


def _answers(path: Path) -> Iterator[tuple[str, str]]:
    """Yield questions and answers, the first sample of a question last."""
    for line in reversed(path.read_bytes().splitlines()):
        rollout = json.loads(line)
        yield str(rollout["input"]), " ".join(str(rollout["output"]).split())
