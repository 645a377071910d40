"""Guess a number from 1 to 32 in at most six turns.

Each turn is a fresh prompt with the numbers that are left: the agent keeps a summary, not a history.
"""

from __future__ import annotations

import math
import re
from typing import Any

from benchmarks.tasks.conversation import Ask, Conversation, Row, halves, model
from insitu import EvalItem, EvalResult, WorkflowContext

LAST = 32
MAX_TURNS = 6
NUM_HELD_OUT = 16
TIMES = 4
RULES = "Guess my number. Reply with one number."
EXAMPLES = (("40 to 44?", "42"), ("3 to 9?", "6"))


def rows(seed: int = 0, split: str = "train") -> list[Row]:
    """Return the secret numbers of a split: 16 to train on, four times each, and 16 held out."""
    secrets = halves(range(1, LAST + 1), seed, NUM_HELD_OUT)[split]
    return [
        {"id": f"{secret}-{time}", "question": {"secret": secret}, "answer": secret}
        for time in range(TIMES if split == "train" else 1)
        for secret in secrets
    ]


async def play(question: dict[str, int], context: WorkflowContext) -> dict[str, Any]:
    """Let the model guess."""
    return await episode(question, model(context))


async def episode(question: dict[str, int], ask: Ask) -> dict[str, Any]:
    """Return the guesses, how much each one was to tell, and whether the last one was right."""
    secret, low, high = question["secret"], 1, LAST
    guesses: list[int | None] = []
    told: list[float] = []
    while len(guesses) < MAX_TURNS:
        reply = await Conversation(ask, RULES, EXAMPLES).say(f"{low} to {high}?")
        guess = read(reply)
        guesses.append(guess)
        told.append(information(guess, low, high))
        if guess == secret:
            return {"guesses": guesses, "told": told, "solved": True}
        if guess is not None and low <= guess <= high:
            low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
    return {"guesses": guesses, "told": told, "solved": False}


def read(reply: str) -> int | None:
    """Return the number that a reply is. One within other words, or of several, is no guess."""
    found = re.fullmatch(r"\s*(\d{1,9})\.?\s*", reply)
    return int(found[1]) if found else None


def information(guess: int | None, low: int, high: int) -> float:
    """Return what a guess is expected to tell, as a share of what the best guess would."""
    if guess is None or not low <= guess <= high:
        return 0.0
    middle = (low + high) // 2
    best = _entropy(middle - low, 1, high - middle)
    return _entropy(guess - low, 1, high - guess) / best if best else 1.0


def _entropy(*counts: int) -> float:
    total = sum(counts)
    return -sum(count / total * math.log(count / total) for count in counts if count)


def reward(item: EvalItem) -> EvalResult:
    """Give the mean share of the possible information of its guesses; a lucky guess earns no more."""
    output = item.output
    turns = len(output["guesses"])
    figures = {"success": float(output["solved"]), "guesses": float(turns if output["solved"] else turns + 1)}
    return EvalResult(item.id, round(sum(output["told"]) / turns, 4), reasoning=figures)
