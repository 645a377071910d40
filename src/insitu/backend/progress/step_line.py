"""The line that `insitu serve` prints for a training step."""

from __future__ import annotations

from collections.abc import Mapping

_COUNTS = (("num_sequences", "sequences"), ("num_tokens", "tokens"))
_FIGURES = (
    ("reward/mean", "reward"),
    ("loss", "loss"),
    ("entropy", "entropy"),
    ("kl/reference", "KL"),
    ("kl/teacher", "KL to the teacher"),
    ("dpo/accuracy", "pairs in order"),
    ("mismatch/kl", "mismatch"),
)


def step_line(run: str, step: int, figures: Mapping[str, float]) -> str:
    """Summarize a step that is committed and served."""
    parts = [f"{figures[name]:,.0f} {noun}" for name, noun in _COUNTS if name in figures]
    parts += [
        f"{noun} {figures[name]:.4g}"
        for name, noun in _FIGURES
        if name in figures and not (name == "kl/reference" and not figures[name])  # 0: no penalty
    ]
    if not figures.get("updated", 1.0):
        parts.append("weights unchanged")
    took = f"{figures['time/step_seconds']:.0f} s"
    return f"run {run}: step {step} published after {took}: {', '.join(parts)}"
