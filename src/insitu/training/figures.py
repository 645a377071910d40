"""The sums of a step → its reported metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from insitu.training.step import SUM_NAMES


def step_figures(passes: Sequence[Sequence[float]], num_tokens: int) -> dict[str, float]:
    """Average the sums per sampled token. Mismatch and entropy are from before the first update, clips from
    the last pass: on the first, the ratio is 1 and nothing can be clipped. Mismatch covers only tokens that
    no grammar constrained, and is omitted if there are none."""
    if not passes:
        return {}
    count = max(1, num_tokens)
    before: dict[str, float] = dict(zip(SUM_NAMES, passes[0], strict=True))
    after = dict(zip(SUM_NAMES, passes[-1], strict=True))
    return {
        "loss": before["loss"],
        **_mismatch(before),
        "clip/high_fraction": after["clipped_high"] / max(1.0, after["good"]),
        "clip/low_fraction": after["clipped_low"] / max(1.0, after["bad"]),
        "entropy": before["entropy"] / count,
        "kl/reference": before["reference_kl"] / count,
    }


def _mismatch(sums: Mapping[str, float]) -> dict[str, float]:
    count = sums["free"]
    if not count:
        return {}
    return {
        "mismatch/mean_abs": sums["mismatch_abs"] / count,
        "mismatch/kl": sums["mismatch_kl"] / count,
        "mismatch/mean_weight": sums["weight"] / count,
        "mismatch/effective_samples": sums["weight"] ** 2 / max(1e-30, sums["weight_squared"] * count),
        "mismatch/capped_fraction": sums["weight_capped"] / count,
    }
