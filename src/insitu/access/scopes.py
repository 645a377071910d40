"""The scopes of a key."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Scope(StrEnum):
    """A part of the work that a key is for. `admin` includes the others."""

    INFER = "infer"
    SUBMIT = "submit"
    ADMIN = "admin"


def create_hint(scopes: Iterable[Scope]) -> str:
    """Return the command that makes a key with these scopes, and where to run it."""
    options = " ".join(f"--scope {scope}" for scope in scopes)
    return f"beside the backend, with the --state-dir of `insitu serve`: insitu keys create NAME {options}"
