"""The sums of a step → the figures that are reported."""

from __future__ import annotations

from collections.abc import Sequence

from insitu.training.step import SUM_NAMES


def step_figures(passes: Sequence[Sequence[float]], num_tokens: int) -> dict[str, float]:
    """Per sampled token. Mismatch and entropy are those before the first update, clips those of the last
    pass: on the first one the ratio is 1 and nothing can be clipped."""
    if not passes:
        return {}
    count = max(1, num_tokens)
    before = dict(zip(SUM_NAMES, passes[0], strict=True))
    after = dict(zip(SUM_NAMES, passes[-1], strict=True))
    return {
        "loss": before["loss"],
        "mismatch/mean_abs": before["mismatch_abs"] / count,
        "mismatch/kl": before["mismatch_kl"] / count,
        "mismatch/mean_weight": before["weight"] / count,
        "mismatch/effective_samples": before["weight"] ** 2 / max(1e-30, before["weight_squared"] * count),
        "mismatch/capped_fraction": before["weight_capped"] / count,
        "clip/high_fraction": after["clipped_high"] / max(1.0, after["good"]),
        "clip/low_fraction": after["clipped_low"] / max(1.0, after["bad"]),
        "entropy": before["entropy"] / count,
        "kl/reference": before["reference_kl"] / count,
    }
