"""The reward for a game: shaped, so that a model that cannot play yet learns to make legal moves first."""

from __future__ import annotations

from insitu import EvalItem, EvalResult

SCORES = {"won": 1.0, "drawn": 0.6, "lost": 0.3}
"""Of games without an illegal move."""


def reward(item: EvalItem) -> EvalResult:
    """Give 1 for a win, 0.6 for a draw, 0.3 for a loss; an illegal move ends it with 0.05 per legal one."""
    ending, legal = item.output["ending"], len(item.output["moves"])
    illegal = ending == "illegal"
    score = 0.05 * legal if illegal else SCORES[ending]
    figures = {
        "success": float(ending in ("won", "drawn")),
        "won": float(ending == "won"),
        "legal": legal / (legal + illegal),
        "legal_game": float(not illegal),
    }
    return EvalResult(item.id, round(score, 4), reasoning=figures)
