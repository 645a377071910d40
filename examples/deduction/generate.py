"""Write data/: small puzzles for a small model, larger ones for a larger model, each in two parts.

python generate.py
"""

from __future__ import annotations

import json
from pathlib import Path

from puzzles import LARGE, SMALL, Size, make_puzzles

SEED = 17
NUM_TRAINING, NUM_VALIDATION = 96, 32


def rows(size: Size, name: str) -> list[dict[str, str]]:
    """Return the puzzles of a size as rows of a dataset."""
    made = make_puzzles(size, NUM_TRAINING + NUM_VALIDATION, SEED)
    return [
        {"id": f"{name}-{number}", "question": puzzle.question, "answer": puzzle.answer}
        for number, puzzle in enumerate(made)
    ]


def files() -> dict[str, list[dict[str, str]]]:
    """Return the rows of every file."""
    found: dict[str, list[dict[str, str]]] = {}
    for name, size in (("small", SMALL), ("large", LARGE)):
        made = rows(size, name)
        found[f"{name}-train.jsonl"] = made[:NUM_TRAINING]
        found[f"{name}-validation.jsonl"] = made[NUM_TRAINING:]
    return found


if __name__ == "__main__":
    for name, content in files().items():
        text = "".join(json.dumps(row) + "\n" for row in content)
        (Path(__file__).parent / "data" / name).write_text(text)
