"""The documents of the original harness, whose configurations and commands must work here."""

from __future__ import annotations

from pathlib import Path

import pytest


def original_documents() -> list[str]:
    """Their texts. They lie in `shared/seeds` beside the checkout or further up, and are not part of it."""
    for folder in Path(__file__).resolve().parents:
        found = sorted((folder / "shared" / "seeds").glob("*.txt"))
        if found:
            return [path.read_text() for path in found]
    pytest.skip("shared/seeds is not beside this checkout: its configurations cannot be tried")
