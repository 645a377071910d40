"""examples/tictactoe: its games and its reward. The rules are tested with the benchmark task."""

from __future__ import annotations

import pytest

from examples.tictactoe.reward import reward
from examples.tictactoe.rules import Game
from insitu import EvalItem


def score(ending: str, moves: list[int]) -> float:
    result = reward(EvalItem("game", {}, "won", {"ending": ending, "moves": moves}))
    assert result.score is not None
    return result.score


def test_better_endings_earn_more_and_legal_moves_count_before_an_illegal_one() -> None:
    endings = [
        score("illegal", []),
        score("illegal", [5]),
        score("illegal", [5, 1, 2, 4]),
        score("lost", [5, 1, 2]),
        score("drawn", [5, 1, 2, 4, 9]),
        score("won", [5, 1, 9]),
    ]
    assert endings == sorted(set(endings))
    assert (endings[0], endings[-1]) == (0.0, 1.0)


def test_a_game_is_the_same_for_the_same_moves() -> None:
    boards: list[list[str]] = []
    for _ in range(2):
        game, seen = Game("opponent-3"), []
        for reply in ("5", "1", "2", "3", "4", "6", "7", "8", "9"):
            if game.ending is None and reply in game.shown().partition("Free: ")[2]:
                game.move(reply)
                seen.append(game.shown())
        boards.append(seen)
    assert boards[0] == boards[1]
    assert len(boards[0]) > 2


@pytest.mark.parametrize("reply", ["", "I do not know.", "5"])
def test_a_constant_player_ends_with_an_illegal_move(reply: str) -> None:
    for number in range(20):
        game = Game(f"opponent-{number}")
        while game.ending is None:
            game.move(reply)
        assert game.ending == "illegal"
        assert len(game.mine) <= 1
