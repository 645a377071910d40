"""Show the figures of a benchmark."""

from __future__ import annotations

import json
from typing import Any


def show(figures: dict[str, Any], *, as_json: bool) -> None:
    """Print one JSON object, or a line for each figure."""
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        print(f"{name:28} {value}")
