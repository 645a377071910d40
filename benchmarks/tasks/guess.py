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
EXAMPLES = (("40 to 44?", "42"),)


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
    """Return the guesses, whether the last one was right, and how many numbers are left."""
    secret, low, high = question["secret"], 1, LAST
    guesses: list[int | None] = []
    while len(guesses) < MAX_TURNS:
        reply = await Conversation(ask, RULES, EXAMPLES).say(f"{low} to {high}?")
        found = re.search(r"\d+", reply)
        guess = int(found[0][:9]) if found else None
        guesses.append(guess)
        if guess == secret:
            return {"guesses": guesses, "solved": True, "left": 1}
        if guess is not None and low <= guess <= high:
            low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
    return {"guesses": guesses, "solved": False, "left": high - low + 1}


def reward(item: EvalItem) -> EvalResult:
    """Give 1 for the first guess, 0.1 less for each further one, and up to 0.3 for narrowing it down."""
    output = item.output
    turns = len(output["guesses"])
    narrowed = 1 - math.log(output["left"]) / math.log(LAST)
    score = 1.1 - 0.1 * turns if output["solved"] else 0.3 * narrowed
    figures = {"success": float(output["solved"]), "guesses": float(turns if output["solved"] else turns + 1)}
    return EvalResult(item.id, round(score, 4), reasoning=figures)
