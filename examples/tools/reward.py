"""The reward for an answer: the number decides, and a useful tool call earns a part of it."""

from __future__ import annotations

from insitu import EvalItem, EvalResult
from insitu.rewards.trajectory import tool_calls

RIGHT, FOUND, CALLED = 1.0, 0.4, 0.1


def reward(item: EvalItem) -> EvalResult:
    """Give 1 for the right number alone, 0.4 for having looked up all that was needed, 0.1 for any call.

    The row's `needed` lists the lookups that lead to the answer, such as `price lamp`.
    """
    success = item.output.strip().rstrip(".") == str(item.expected)
    if success:
        return EvalResult(item.id, RIGHT, reasoning={"success": 1.0, "found": 1.0, "called": 1.0})
    looked_up = {
        f"{call.name} {str(call.arguments.get('item')).strip().lower()}"
        for call in tool_calls(item)
        if isinstance(call.arguments, dict)
    }
    found = set(item.row["needed"]) <= looked_up
    score = FOUND if found else CALLED if looked_up else 0.0
    return EvalResult(
        item.id, score, reasoning={"success": 0.0, "found": float(found), "called": float(bool(looked_up))}
    )
