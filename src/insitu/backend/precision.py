"""The precision of the open runs, which a resumed backend must keep."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from insitu.backend.damage import damage_of
from insitu.backend.ledger import Ledger, ledger_url
from insitu.backend.plan.compute import Kept
from insitu.backend.plan.engine import Dtype
from insitu.types import RunState

_OPEN = (RunState.REGISTERED, RunState.LOADING, RunState.READY, RunState.IDLE)


def kept_precision(state_dir: Path, database_url: str | None = None) -> Kept | None:
    """Return the precision of the open run that changed last; None for a new state directory."""
    if database_url is None and not (state_dir / "ledger.db").exists():
        return None
    if database_url is None and damage_of(state_dir / "ledger.db") is not None:
        return None  # the start sets it aside, and says so
    with Ledger(ledger_url(state_dir, database_url)) as ledger:
        known = ledger.precisions()
        runs = [run for run in ledger.list_runs() if run.state in _OPEN and run.step and run.name in known]
    newest = max(runs, key=lambda run: run.updated_at, default=None)
    return None if newest is None else Kept(newest.name, cast("Dtype", known[newest.name]))
