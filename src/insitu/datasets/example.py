"""Example: one row of a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a dataset."""

    id: str
    # The user's own data, which their code reads without a cast.
    input: Any
    expected: Any
    row: Mapping[str, Any]
    """The whole row."""
