"""Answer a question by looking up one of 60 facts: a tool in plain text, two or three turns."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.tasks.conversation import Ask, Conversation, Row, halves, model
from insitu import EvalItem, EvalResult, WorkflowContext

NAMES = (
    *(
        "Ada",
        "Ben",
        "Cara",
        "Dan",
        "Ella",
        "Finn",
        "Gina",
        "Hugo",
        "Ida",
        "Jack",
        "Kira",
        "Leo",
        "Mara",
        "Nils",
    ),
    *("Olga", "Paul", "Rosa", "Sam", "Tina", "Vera"),
)
KINDS = {"city": "lives in", "pet": "has a", "job": "works as a"}
VALUES = {
    "city": ("Oslo", "Rome", "Lima", "Paris", "Cairo", "Delhi", "Quito", "Seoul", "Tokyo", "Berlin"),
    "pet": ("cat", "dog", "horse", "parrot", "rabbit", "turtle", "goat", "hamster", "snake", "duck"),
    "job": ("baker", "pilot", "nurse", "judge", "farmer", "singer", "tailor", "driver", "painter", "teacher"),
}
MAX_TURNS = 3
NUM_HELD_OUT = 20
RULES = "To look something up, reply: search: NAME KIND. When you know it, reply with one word."
EXAMPLES = (("What is the job of Zoe?", "search: Zoe job"), ("Zoe works as a clown.", "clown"))
SCORES = {"right": 1.0, "found": 0.4, "searched": 0.2, "none": 0.0}


def facts() -> dict[tuple[str, str], str]:
    """Return the 60 facts: three of each of 20 people."""
    return {
        (name, kind): VALUES[kind][(7 * number + 3 * (number // 10)) % 10]
        for number, name in enumerate(NAMES)
        for kind in KINDS
    }


def rows(seed: int = 0, split: str = "train") -> list[Row]:
    """Return the questions of a split: 40 facts to train on, 20 held out."""
    known = facts()
    return [
        {"id": f"{name}-{kind}", "question": {"name": name, "kind": kind}, "answer": known[name, kind]}
        for name, kind in halves(list(known), seed, NUM_HELD_OUT)[split]
    ]


def look_up(query: str) -> str | None:
    """Return the fact that the query names by person and kind, as a sentence; None if there is none."""
    words = {word.lower() for word in re.findall(r"\w+", query)}
    for (name, kind), value in facts().items():
        if name.lower() in words and kind in words:
            return f"{name} {KINDS[kind]} {value}."
    return None


async def play(question: dict[str, str], context: WorkflowContext) -> dict[str, Any]:
    """Let the model look up and answer."""
    return await episode(question, model(context))


async def episode(question: dict[str, str], ask: Ask) -> dict[str, Any]:
    """Return the answer, what was searched for, and whether a search found the fact that was asked for."""
    name, kind = question["name"], question["kind"]
    wanted = look_up(f"{name} {kind}")
    conversation = Conversation(ask, RULES, EXAMPLES)
    searches: list[str] = []
    found = False
    said = f"What is the {kind} of {name}?"
    for _ in range(MAX_TURNS):
        reply = await conversation.say(said)
        query = re.match(r"search:(.*)", reply, re.IGNORECASE)
        if query is None:
            return {"answer": reply, "searches": searches, "found": found}
        searches.append(query[1].strip())
        fact = look_up(query[1])
        found = found or fact == wanted
        said = fact or "Not found."
    return {"answer": None, "searches": searches, "found": found}


def reward(item: EvalItem) -> EvalResult:
    """Give 1 for the exact answer, 0.4 for finding the fact alone, 0.2 for any other search.

    An answer that was guessed without the fact earns nothing. Case and a final full stop do not matter.
    """
    output = item.output
    exact = (output["answer"] or "").strip().rstrip(".").lower() == str(item.expected).lower()
    success = exact and output["found"]
    level = (
        "right" if success else "found" if output["found"] else "searched" if output["searches"] else "none"
    )
    figures = {
        "success": float(success),
        "found": float(output["found"]),
        "searched": float(bool(output["searches"])),
    }
    return EvalResult(item.id, SCORES[level], reasoning=figures)
