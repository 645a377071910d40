"""The learning rate to begin with, by the size of the model, the adapter's alpha, and the batch.

Measured: 5e-4 for 135M parameters, at alpha 16 and 64 rollouts per update (docs/evidence.md). Larger models
are judged by published recipes for LoRA and reinforcement learning, at the rate that alpha 16 would need:
2e-5 to 8e-5 for 4B, 1e-4 for 3B and less, 3e-5 for 72B (docs/decisions/0013-defaults.md). An update of LoRA
grows with alpha and not with the rank; the noise of Adam's direction falls as the batch grows.
"""

from __future__ import annotations

import math
import re

_MEASURED_RATE, _MEASURED_PARAMETERS, ROLLOUTS = 5e-4, 0.135e9, 64
_EXPONENT = 0.55
ALPHA = 16
FAR = 4.0
"""A rate beyond this multiple of the recommended one, or below its inverse, deserves a second look."""
_SIZE = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)([mb])(?![a-z0-9])", re.IGNORECASE)


def recommended_rate(
    num_parameters: float, *, alpha: float = ALPHA, rollouts_per_update: int = ROLLOUTS
) -> float:
    """Return the learning rate to begin with, to one significant digit."""
    rate = _MEASURED_RATE * (_MEASURED_PARAMETERS / num_parameters) ** _EXPONENT
    rate *= ALPHA / alpha * math.sqrt(rollouts_per_update / ROLLOUTS)
    return float(f"{rate:.0e}")


def parameters_in_name(model: str) -> float | None:
    """Return the number of parameters that a name such as `Qwen2.5-3B-Instruct` says; None if none."""
    found = _SIZE.search(model.rpartition("/")[2].replace("_", "-"))
    if found is None:
        return None
    return float(found[1]) * (1e9 if found[2].lower() == "b" else 1e6)


def rate_warning(rate: float, recommended: float) -> str:
    """Say that a rate is far from the recommended one; "" if it is not."""
    if 1 / FAR <= rate / recommended <= FAR:
        return ""
    times = rate / recommended
    far = f"{times:.0f} times" if times > 1 else f"1/{1 / times:.0f} of"
    return (
        f"learning_rate {rate:g} is {far} the {recommended:g} to begin with for this model, alpha and batch"
    )
