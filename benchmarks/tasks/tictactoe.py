"""Tic-tac-toe against a random player, with the rules and the reward of examples/tictactoe."""

from __future__ import annotations

from typing import Any

from benchmarks.tasks.conversation import Ask, Conversation, Row, halves, model
from examples.tictactoe.reward import reward
from examples.tictactoe.rules import EXAMPLES, RULES, Game
from insitu import WorkflowContext

__all__ = ["episode", "play", "reward", "rows"]

NUM_GAMES, NUM_HELD_OUT = 96, 32


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
    game = Game(question["opponent"])
    conversation = Conversation(ask, RULES, EXAMPLES)
    while game.ending is None:
        game.move(await conversation.say(game.shown()))
    return {"moves": game.mine, "ending": game.ending}
