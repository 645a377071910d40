"""The reward for an answer: partial credit for each part that is right."""

from __future__ import annotations

import re

from insitu import EvalItem, EvalResult

FORM = 0.1
"""Of an answer with as many parts as were asked for."""


def reward(item: EvalItem) -> EvalResult:
    """Give 1 for all parts, 0.1 for the right number of parts, and the square of the right share between.

    The square makes the last part worth the most: guessing one part well must not be a place to stay.
    """
    said, expected = parts(item.output), parts(item.expected)
    if len(said) != len(expected):
        return EvalResult(item.id, 0.0, reasoning={"success": 0.0, "form": 0.0, "right": 0.0})
    right = sum(one == other for one, other in zip(said, expected, strict=True)) / len(expected)
    score = FORM + (1 - FORM) * right**2
    return EvalResult(
        item.id, round(score, 4), reasoning={"success": float(right == 1), "form": 1.0, "right": right}
    )


def parts(text: str) -> list[str]:
    """Read the parts of an answer: the last line after `Answer:`, without case and final full stop."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return []
    last = re.sub(r"^\W*answer\W*:", "", lines[-1], flags=re.IGNORECASE)
    return [part.strip(" .*`").casefold() for part in last.split(",")]
