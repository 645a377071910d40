"""The shape that a family of models gives its logits, between the output head and the softmax.

The trainer scores tokens with the head alone and shapes the logits as the family does. Whether this is all
that the family does is checked at every load (`self_check.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitShaping:
    """A scale and a cap, of logits after the head."""

    scale: float = 1.0
    softcap: float | None = None
    """Logits, once scaled, are bent to lie within plus and minus this."""

    def shape_(self, logits: Tensor, *, with_slope: bool = False) -> Tensor | None:
        """Shape the logits in place; return the slope of the cap at each of them, if it is asked for."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is None:
            return None
        bent = logits.div_(self.softcap).tanh_()
        slope = 1 - bent.square() if with_slope else None
        bent.mul_(self.softcap)
        return slope


PLAIN = LogitShaping()


def shaping_of(config: Any) -> LogitShaping:
    """Read the settings of the families that shape their logits, from the configuration of the text part."""
    text = config.get_text_config()
    scale = 1.0
    for multiplier in ("logit_scale", "lm_head_multiplier"):  # Cohere; Falcon-H1
        scale *= getattr(text, multiplier, None) or 1.0
    scale /= getattr(text, "logits_scaling", None) or 1.0  # Granite
    return LogitShaping(scale, getattr(text, "final_logit_softcapping", None))  # Gemma
