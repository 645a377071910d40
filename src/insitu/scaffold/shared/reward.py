"""The reward for an answer."""

from __future__ import annotations

import re

from insitu import EvalItem


def reward(item: EvalItem) -> float:
    """Give 1 for the total alone, 0.3 for a wrong number alone, 0.1 for the total somewhere in the text."""
    said = item.output.strip().rstrip(".")
    if said == item.expected:
        return 1.0
    if said.isdigit():
        return 0.3
    return 0.1 if item.expected in re.findall(r"\d+", item.output) else 0.0
