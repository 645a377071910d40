"""The witness of a run's last committed step, beside its checkpoints: it tells an older ledger apart.

It is written after the ledger has committed, so it may be behind the ledger, and is never ahead of it: unless
the ledger was replaced by an older copy, or lost its last pages. Before a run falls back, its witness does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import orjson

from insitu.json_values import as_object
from insitu.system.durable import write_atomic

FILE = "committed.json"


@dataclass(frozen=True, slots=True)
class Witness:
    """A step that the ledger had committed."""

    run: str
    step: int | None
    """None if the file cannot be read."""


def note(run_dir: Path, step: int) -> None:
    """Write that this is the run's last step."""
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomic(run_dir / FILE, orjson.dumps({"step": step}), 0o600)


def remove(run_dir: Path) -> None:
    """Delete the witness of a run that is about to be deleted."""
    (run_dir / FILE).unlink(missing_ok=True)


def read_all(runs_dir: Path) -> list[Witness]:
    """Return the witness of every run directory that has one."""
    return [Witness(path.parent.name, _step_in(path)) for path in sorted(runs_dir.glob(f"*/{FILE}"))]


def _step_in(path: Path) -> int | None:
    try:
        step = (as_object(orjson.loads(path.read_bytes())) or {}).get("step")
    except (OSError, orjson.JSONDecodeError):
        return None
    return step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else None
