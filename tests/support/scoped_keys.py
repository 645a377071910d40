"""One key of every kind, and the answer that each should get at a route."""

from __future__ import annotations

import time
from itertools import combinations
from pathlib import Path

import pytest

from insitu.access.key_changes import create_key, revoke_key
from insitu.access.routes import Access, Need
from insitu.access.scopes import Scope

VALID = [frozenset(some) for count in (1, 2, 3) for some in combinations(Scope, count)]


def valid_keys(state_dir: Path) -> dict[frozenset[Scope], str]:
    """Create a key for every set of scopes."""
    return {scopes: create_key(state_dir, "-".join(sorted(scopes)), [*scopes])[0] for scopes in VALID}


def ended_keys(state_dir: Path) -> dict[str, str]:
    """Create keys that are over, by how they ended; they would have every scope."""
    expired, _ = create_key(state_dir, "short", [Scope.ADMIN], lifetime_seconds=0.001)
    revoked, _ = create_key(state_dir, "gone", [Scope.ADMIN])
    revoke_key(state_dir, "gone")
    time.sleep(0.01)
    return {"expired": expired, "revoked": revoked}


def check_answer(need: Need, scopes: frozenset[Scope], status: int, body: str, what: object) -> None:
    """Check the answer to a valid key: 403 with the scope and the command, or past the door."""
    if isinstance(need, Access) or need in scopes or Scope.ADMIN in scopes:
        assert status not in (401, 403, 405, 500), (what, status, body)
        return
    assert status == 403, (what, status, body)
    assert f"scope `{need}`" in body, (what, body)
    assert f"insitu keys create NAME --scope {need}" in body, (what, body)


def needs(table: dict[str, Need], name: str) -> Need:
    """Return what a route needs; a route that is not in the table fails the test."""
    if name not in table:
        pytest.fail(f"{name}: add the route to src/insitu/access/routes.py and docs/keys.md")
    return table[name]
