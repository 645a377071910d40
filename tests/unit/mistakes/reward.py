"""Mistakes in the reward."""

from __future__ import annotations

from tests.unit.mistakes.desk import Desk, Mistake, Provoke, config, text


def scoring(body: str) -> Provoke:
    """A reward that is wrong only when it scores."""

    def provoke(desk: Desk):
        desk.write("reward.py", f"def score(item):\n    {body}\n")
        return desk.score()

    return provoke


MISTAKES = [
    Mistake(
        "a word that means nothing",
        config(reward="accuracy"),
        "should be module:function",
        "accuracy",
        "exact_match",
    ),
    Mistake(
        "it takes more than the item",
        text("reward.py", "def score(output, expected):\n    return 1.0\n"),
        "cannot be called with an item",
        "reward:score",
        "item.output",
    ),
    Mistake(
        "it yields",
        text("reward.py", "def score(item):\n    yield 1.0\n"),
        "is a generator",
        "reward:score",
        "return the score",
    ),
    Mistake(
        "an argument it does not have",
        config(reward={"entry": "reward:score", "args": {"strict": True}}),
        "strict",
        "reward:score",
        "args holds the function's arguments",
    ),
    Mistake(
        "it returns a text", scoring("return 'good'"), "is a str, not a number", "good", "return a number"
    ),
    Mistake("it returns nothing", scoring("pass"), "returned no score", "None", "return a number"),
    Mistake(
        "it is not a number", scoring("return float('nan')"), "not a finite number", "nan", "return a number"
    ),
]
