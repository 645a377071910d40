"""The words over a plot: the held-out reward before and after, and how sure the difference is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from insitu.harness.files.metrics import StepLine, ValidationEntry
from insitu.harness.gains.gain import GainFields, GainOutcome


class Headline(NamedTuple):
    """A sentence in large type, and a line below it in small type."""

    sentence: str = ""
    detail: str = ""


def headline(steps: Sequence[StepLine], validations: Sequence[ValidationEntry]) -> Headline:
    """Say what the run has reached so far; nothing if there is no reward yet."""
    before = next((entry for entry in validations if entry["step"] == 0), None)
    best = best_of(validations)
    first = None if before is None else before.get("avg_reward")
    last = None if best is None else best.get("avg_reward")
    if first is None or best is None or last is None:
        return _of_training(steps)
    if (gain := best.get("gain")) is not None:
        return _compared(first, last, gain)
    if best["step"]:
        return Headline(f"Held-out reward: {first:.2f} before training, {last:.2f} at step {best['step']}")
    if all(entry["step"] == 0 for entry in validations):
        return Headline(f"Held-out reward: {first:.2f} before training")
    return Headline(f"Held-out reward: {first:.2f} before training, and no step is better")


def best_of(validations: Sequence[ValidationEntry]) -> ValidationEntry | None:
    """Return the best step's second measurement, or else the first of the highest validations."""
    again = [entry for entry in validations if entry.get("remeasured")]
    if again:
        return again[-1]
    known = [(reward, entry) for entry in validations if (reward := entry.get("avg_reward")) is not None]
    return max(known, key=lambda pair: pair[0])[1] if known else None


def _compared(first: float, last: float, gain: GainFields) -> Headline:
    outcome, low, high = GainOutcome(gain["verdict"]), gain["low"], gain["high"]
    both = f"{first:.2f} before and {last:.2f} after training"
    if outcome is GainOutcome.TOO_FEW or low is None or high is None:
        return Headline(f"Held-out reward: {both}", "too few examples for an interval")
    confidence = f"{100 * gain['confidence']:.3g} % interval"
    detail = f"difference {gain['difference']:+.2f}, {confidence} {low:+.2f} to {high:+.2f}"
    match outcome:
        case GainOutcome.BETTER:
            return Headline(f"Held-out reward rose from {first:.2f} to {last:.2f}", detail)
        case GainOutcome.WORSE:
            return Headline(f"Held-out reward fell from {first:.2f} to {last:.2f}", detail)
        case GainOutcome.UNCLEAR:
            return Headline(f"Held-out reward: {both}, no real difference", detail)


def _of_training(steps: Sequence[StepLine]) -> Headline:
    known = [reward for line in steps if (reward := line.get("avg_reward")) is not None]
    if not known:
        return Headline()
    if len(known) == 1:
        return Headline(f"Training reward: {known[0]:.2f} in the first step")
    return Headline(f"Training reward: {known[0]:.2f} in the first step, {known[-1]:.2f} in the last")
