"""Answer questions about a table in SQL: SQLite runs the query, and a failed one may be written again."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from benchmarks.tasks.conversation import Ask, Conversation, Row, halves, model
from insitu import EvalItem, EvalResult, WorkflowContext

SHOP = (
    *(
        ("apple", 3, 40),
        ("bread", 5, 12),
        ("candle", 8, 7),
        ("drum", 60, 2),
        ("eraser", 2, 90),
        ("fork", 4, 33),
    ),
    *(
        ("guitar", 95, 1),
        ("hammer", 18, 9),
        ("ink", 6, 25),
        ("jacket", 70, 4),
        ("kettle", 35, 6),
        ("lamp", 28, 8),
    ),
)
NAMES = tuple(name for name, _, _ in SHOP)
COLUMNS = ("price", "stock")
LIMITS = (3, 4, 5, 7, 8, 9, 10, 20, 30, 50)
MAX_TURNS = 2
NUM_SHOTS = 8
NUM_HELD_OUT = 24
MAX_SECONDS = 0.5
RULES = "Table items(name, price, stock). Reply with one SQL query."
EXAMPLES = (
    ("What is the price of the spoon?", "SELECT price FROM items WHERE name = 'spoon'"),
    ("How many items have a stock over 15?", "SELECT count(*) FROM items WHERE stock > 15"),
)


def rows(seed: int = 0, split: str = "train") -> list[Row]:
    """Return the questions of a split: 40 to train on, 24 held out."""
    return [
        {"id": question, "question": question, "answer": run(query)[0]}
        for question, query in halves(questions(), seed, NUM_HELD_OUT)[split]
    ]


def questions() -> list[tuple[str, str]]:
    """Return all questions, each with a query that answers it."""
    cells = [
        (f"What is the {column} of the {name}?", f"SELECT {column} FROM items WHERE name = '{name}'")
        for name in NAMES
        for column in COLUMNS
    ]
    counts = [
        (
            f"How many items have a {column} {word} {limit}?",
            f"SELECT count(*) FROM items WHERE {column} {sign} {limit}",
        )
        for column in COLUMNS
        for word, sign in (("over", ">"), ("under", "<"))
        for limit in LIMITS
    ]
    return cells + counts


def run(query: str) -> tuple[str | None, str]:
    """Run a query on the table. Return the first column of its first rows as text, or None and the error.

    The query comes from a model: it may only read, and only for half a second.
    """
    with closing(sqlite3.connect(":memory:")) as shop:
        shop.execute("CREATE TABLE items (name TEXT, price INTEGER, stock INTEGER)")
        shop.executemany("INSERT INTO items VALUES (?, ?, ?)", SHOP)
        deadline = time.monotonic() + MAX_SECONDS
        shop.set_progress_handler(lambda: time.monotonic() > deadline, 1000)
        shop.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10_000)
        shop.set_authorizer(_only_reading)
        try:
            found = shop.execute(query).fetchmany(20)
        except (sqlite3.Error, sqlite3.Warning) as error:
            return None, str(error)
    if not found:
        return None, "no rows"
    return ", ".join(str(row[0]) for row in found), ""


def _only_reading(action: int, *_: str | None) -> int:
    allowed = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)
    return sqlite3.SQLITE_OK if action in allowed else sqlite3.SQLITE_DENY


async def play(question: str, context: WorkflowContext) -> dict[str, Any]:
    """Let the model write the query."""
    return await episode(question, model(context))


async def play_with_shots(question: str, context: WorkflowContext) -> dict[str, Any]:
    """Play with training questions and their queries in the prompt: what a user would try before training."""
    return await episode(question, model(context), shots(int(os.environ["INSITU_EVIDENCE_SEED"])))


def shots(seed: int) -> list[tuple[str, str]]:
    """Return training questions of a split with their queries."""
    return random.Random(seed).sample(halves(questions(), seed, NUM_HELD_OUT)["train"], NUM_SHOTS)


async def episode(question: str, ask: Ask, examples: Sequence[tuple[str, str]] = EXAMPLES) -> dict[str, Any]:
    """Return the queries and the last result; a query without a result may be written again once."""
    conversation = Conversation(ask, RULES, examples)
    queries: list[str] = []
    said, result = question, None
    while result is None and len(queries) < MAX_TURNS:
        queries.append(await conversation.say(said))
        result, error = run(queries[-1])
        said = f"Error: {error[:60]}. {question}"
    return {"queries": queries, "result": result}


def reward(item: EvalItem) -> EvalResult:
    """Give 1 for the right result, 0.8 after a retry, 0.2 for another result, 0.05 for a failed SELECT."""
    output = item.output
    success = output["result"] == str(item.expected)
    first = len(output["queries"]) == 1
    if success:
        score = 1.0 if first else 0.8
    elif output["result"] is not None:
        score = 0.2 if first else 0.15
    else:
        score = 0.05 if any(query.lower().startswith("select ") for query in output["queries"]) else 0.0
    figures = {
        "success": float(success),
        "executed": float(output["result"] is not None),
        "first": float(first),
    }
    return EvalResult(item.id, score, reasoning=figures)
