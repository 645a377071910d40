"""Write data/: questions that need one lookup, and others that need two or a multiplication.

python generate.py
"""

from __future__ import annotations

import json
from pathlib import Path

from shop import ITEMS, PRICES, STOCK

NUM_TRAINING_ITEMS = 28
Row = dict[str, object]


def lookups(item: str) -> list[Row]:
    """Return the questions about an item that one tool answers."""
    return [
        _row(item, "price", f"What is the price of the {item}?", PRICES[item], ["price"]),
        _row(item, "stock", f"How many of the {item} are in stock?", STOCK[item], ["stock"]),
    ]


def sums(item: str) -> list[Row]:
    """Return the questions about an item that need a calculation on what the tools say."""
    count = 2 + ITEMS.index(item) % 8
    worth, order = PRICES[item] * STOCK[item], PRICES[item] * count
    return [
        _row(item, "worth", f"What is all of our stock of the {item} worth?", worth, ["price", "stock"]),
        _row(item, "order", f"What do {count} of the {item} cost?", order, ["price"]),
    ]


def _row(item: str, kind: str, question: str, answer: int, tools: list[str]) -> Row:
    needed = [f"{tool} {item}" for tool in tools]
    return {"id": f"{item}-{kind}", "question": question, "answer": str(answer), "needed": needed}


def files() -> dict[str, list[Row]]:
    """Return the rows of every file. Items to validate on are in no question to train on."""
    parts = {"train": ITEMS[:NUM_TRAINING_ITEMS], "validation": ITEMS[NUM_TRAINING_ITEMS:]}
    return {
        f"{name}-{part}.jsonl": [row for item in items for row in make(item)]
        for name, make in (("lookups", lookups), ("sums", sums))
        for part, items in parts.items()
    }


if __name__ == "__main__":
    for name, content in files().items():
        text = "".join(json.dumps(row) + "\n" for row in content)
        (Path(__file__).parent / "data" / name).write_text(text)
