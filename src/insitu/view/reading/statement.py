"""SQL that is composed of parts written in the code. The type checker proves that no value is among them."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import LiteralString


def ask(db: sqlite3.Connection, statement: LiteralString, values: Sequence[object] = ()) -> sqlite3.Cursor:
    """Execute a statement; its values are bound."""
    return db.execute(statement, list(values))


def marks(count: int) -> LiteralString:
    """Return the places of so many values."""
    return ("?, " * count)[:-2]
