"""Write data/: 64 opponents to train against, 32 others to validate against. Each plays at random, with a
seed of its own.

python generate.py
"""

from __future__ import annotations

import json
from pathlib import Path

NUM_TRAINING, NUM_VALIDATION = 64, 32


def rows(first: int, count: int) -> list[dict[str, object]]:
    """Return one game per opponent."""
    return [
        {"id": f"game-{number}", "question": {"opponent": f"opponent-{number}"}, "answer": "won"}
        for number in range(first, first + count)
    ]


def files() -> dict[str, list[dict[str, object]]]:
    """Return the rows of every file."""
    return {
        "train.jsonl": rows(0, NUM_TRAINING),
        "validation.jsonl": rows(NUM_TRAINING, NUM_VALIDATION),
    }


if __name__ == "__main__":
    for name, content in files().items():
        text = "".join(json.dumps(row) + "\n" for row in content)
        (Path(__file__).parent / "data" / name).write_text(text)
