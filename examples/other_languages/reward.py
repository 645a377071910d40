"""The reward for an answer."""

from __future__ import annotations

import re

from insitu import EvalItem


def reward(item: EvalItem) -> float:
    """Give 1 for the number alone; otherwise little, and less the longer the answer."""
    said = str(item.output).strip().rstrip(".")
    if said == item.expected:
        return 1.0
    found = 0.2 if item.expected in re.findall(r"\d+", said) else 0.0
    return found - 0.001 * min(len(said), 100)
