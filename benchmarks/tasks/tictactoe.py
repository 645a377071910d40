"""Tic-tac-toe against a random player; the model is X, moves first and names a free square."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from benchmarks.tasks.conversation import Ask, Conversation, Row, halves, model
from insitu import EvalItem, EvalResult, WorkflowContext

SQUARES = tuple(range(1, 10))
LINES = ((1, 2, 3), (4, 5, 6), (7, 8, 9), (1, 4, 7), (2, 5, 8), (3, 6, 9), (1, 5, 9), (3, 5, 7))
MAX_MOVES = 5
NUM_GAMES, NUM_HELD_OUT = 96, 32
RULES = "Play tic-tac-toe as X. Reply with the number of a free square."
EXAMPLES = (("Free: 3 6 8", "6"),)
SCORES = {"won": 1.0, "drawn": 0.6, "lost": 0.3}
"""Of games without an illegal move."""


def rows(seed: int = 0, split: str = "train") -> list[Row]:
    """Return the games of a split, each with its own random opponent: 64 to train on, 32 held out."""
    games = halves(range(NUM_GAMES), seed, NUM_HELD_OUT)[split]
    return [
        {"id": f"game-{game}", "question": {"opponent": f"{seed}/{game}"}, "answer": "won"} for game in games
    ]


async def play(question: dict[str, str], context: WorkflowContext) -> dict[str, Any]:
    """Let the model play one game."""
    return await episode(question, model(context))


async def episode(question: dict[str, str], ask: Ask) -> dict[str, Any]:
    """Return the model's legal moves and how the game ended: won, drawn, lost or illegal."""
    opponent = random.Random(question["opponent"])
    conversation = Conversation(ask, RULES, EXAMPLES)
    mine: list[int] = []
    theirs: list[int] = []
    while True:
        move = legal_move(await conversation.say(shown(mine, theirs)), free(mine, theirs))
        if move is None:
            return {"moves": mine, "ending": "illegal"}
        mine.append(move)
        if has_line(mine):
            return {"moves": mine, "ending": "won"}
        if len(mine) == MAX_MOVES:
            return {"moves": mine, "ending": "drawn"}
        theirs.append(opponent.choice(free(mine, theirs)))
        if has_line(theirs):
            return {"moves": mine, "ending": "lost"}


def free(mine: Sequence[int], theirs: Sequence[int]) -> list[int]:
    """Return the squares that nobody has taken."""
    return [square for square in SQUARES if square not in mine and square not in theirs]


def shown(mine: Sequence[int], theirs: Sequence[int]) -> str:
    """Describe the board: `X: 5 O: 1 Free: 2 3 4 6 7 8 9`."""
    sides = (("X", mine), ("O", theirs), ("Free", free(mine, theirs)))
    return " ".join(f"{name}: {' '.join(map(str, squares))}" for name, squares in sides if squares)


def legal_move(reply: str, squares: Sequence[int]) -> int | None:
    """Read the first number of the reply; None if it is not a free square."""
    found = re.search(r"\d+", reply)
    return int(found[0]) if found and found[0] in map(str, squares) else None


def has_line(squares: Sequence[int]) -> bool:
    """Return whether one side has three in a row."""
    return any(set(line) <= set(squares) for line in LINES)


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
