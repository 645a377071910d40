"""Progress in words: the pieces that the live display and the plain lines share."""

from __future__ import annotations

from insitu.harness.screen.figures import PhaseFigures, TrainingFigures


def duration(seconds: float) -> str:
    """Format for people: 40 s, 2 min 5 s, 47 min, 3 h 20 min."""
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    minutes = round(whole / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"


def phase_line(phase: PhaseFigures) -> str:
    """Format a phase that goes on."""
    count = f"{phase.name}: {phase.done}/{phase.total} rollouts"
    failures = [f"{phase.num_failed} failed"] if phase.num_failed else []
    return ", ".join([count, *failures, *pace(phase, phase.tokens_per_second), *left(phase.seconds_left)])


def training_line(training: TrainingFigures) -> str:
    """Format a training step that goes on."""
    return f"training: {training.phase}, {training.fraction:.0%}, {duration(training.seconds)} so far"


def phase_result(phase: PhaseFigures) -> str:
    """Format the line that remains after a phase, with the rate over the whole phase."""
    count = f"{phase.name}: {phase.done}/{phase.total} rollouts in {duration(phase.seconds)}"
    if phase.kept:
        count += f" ({phase.kept} kept from an earlier start)"
    rate = phase.num_output_tokens / max(phase.seconds, 1.0)
    return ", ".join([count, *failed(phase), *pace(phase, rate)])


def failed(phase: PhaseFigures) -> list[str]:
    """Format the failed rollouts by ending; empty if there are none."""
    kinds = ", ".join(f"{count} {ending}" for ending, count in sorted(phase.failures.items()))
    return [f"{phase.num_failed} failed ({kinds})"] if phase.num_failed else []


def pace(phase: PhaseFigures, rate: float | None) -> list[str]:
    """Format the mean reward and the rate of output tokens, as far as they are known."""
    reward = [] if phase.reward is None else [f"reward {phase.reward:.3f}"]
    return [*reward, f"{rate:.0f} tokens/s"] if rate is not None and phase.num_output_tokens else reward


def left(seconds: float | None) -> list[str]:
    """Format the estimate, rounded so that it does not flicker; empty if there is none."""
    if seconds is None:
        return []
    unit = 1 if seconds < 20 else 5 if seconds < 120 else 60
    return [f"about {duration(round(seconds / unit) * unit)} left"]
