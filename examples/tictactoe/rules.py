"""Tic-tac-toe against a random player: the model is X, moves first and names a free square."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

SQUARES = tuple(range(1, 10))
LINES = ((1, 2, 3), (4, 5, 6), (7, 8, 9), (1, 4, 7), (2, 5, 8), (3, 6, 9), (1, 5, 9), (3, 5, 7))
MAX_MOVES = 5
RULES = "Play tic-tac-toe as X. Reply with the number of a free square."
EXAMPLES = (("Free: 3 6 8", "6"),)
"""A question and its answer, so that a small model sees the form."""


class Game:
    """One game. The same name of the opponent and the same moves give the same game."""

    def __init__(self, opponent: str) -> None:
        self._opponent = random.Random(opponent)  # noqa: S311 - a game, not a secret
        self.mine: list[int] = []
        self.theirs: list[int] = []
        self.ending: str | None = None
        """`won`, `drawn`, `lost` or `illegal`; None while the game goes on."""

    def shown(self) -> str:
        """Describe the board to the model."""
        return shown(self.mine, self.theirs)

    def move(self, reply: str) -> None:
        """Play the model's move, then the opponent's."""
        move = legal_move(reply, free(self.mine, self.theirs))
        if move is None:
            self.ending = "illegal"
            return
        self.mine.append(move)
        if has_line(self.mine):
            self.ending = "won"
        elif len(self.mine) == MAX_MOVES:
            self.ending = "drawn"
        else:
            self.theirs.append(self._opponent.choice(free(self.mine, self.theirs)))
            if has_line(self.theirs):
                self.ending = "lost"


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
