"""Filters of a dataset's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from insitu.datasets.dataset_config import FilterConfig, Pattern
from insitu.datasets.values import to_text
from insitu.errors import InvalidRequest
from insitu.plugins import nearest

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Filtered:
    """Positions of the rows that are left, and the number that each filter removed."""

    kept: list[int]
    removed: dict[str, int]
    """For example ``{"allowlist level": 12}``."""


def apply_filters(rows: Sequence[Row], config: FilterConfig) -> Filtered:
    """Select the rows that match every column of the allowlist and no column of the denylist, in order."""
    kept, removed = list(range(len(rows))), dict[str, int]()
    for list_name, entry in (("allowlist", config.allowlist), ("denylist", config.denylist)):
        for column, patterns in (entry.field if entry else {}).items():
            _check_column(rows, column, list_name)
            wanted = list_name == "allowlist"
            left = [at for at in kept if _matches(rows[at].get(column), patterns) == wanted]
            removed[f"{list_name} {column}"] = len(kept) - len(left)
            kept = left
    return Filtered(kept, removed)


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Return the columns of all rows, in order of first appearance."""
    return list(dict.fromkeys(column for row in rows for column in row))


def _check_column(rows: Sequence[Row], column: str, list_name: str) -> None:
    if rows and not any(column in row for row in rows):
        known = columns_of(rows)
        raise InvalidRequest(
            f"filter.{list_name}: no row has a column `{column}`{nearest(column, known)}",
            hint=f"columns: {', '.join(known)}",
        )


def _matches(cell: object, patterns: Sequence[Pattern]) -> bool:
    text = "" if cell is None else to_text(cell)
    return any(
        fnmatchcase(text, pattern) if isinstance(pattern, str) else text in (to_text(pattern), str(pattern))
        for pattern in patterns
    )
