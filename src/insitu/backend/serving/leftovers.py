"""Remove the checkpoint directories that a crash left behind; run it before anything is written.

A pruned checkpoint leaves the ledger first and the disk afterwards, so a crash between the two leaves its
directory. Such a step is behind the run's own. Steps ahead of it stay: they were written and not committed,
or lost, and the next training replaces them. Step 0 stays too: it is never pruned. Merged weights go unless
their run is open.
"""

from __future__ import annotations

from pathlib import Path

from insitu.backend.ledger import Ledger
from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.types import RunState


def remove_leftovers(ledger: Ledger, runs_dir: Path) -> list[Path]:
    """Delete unfinished directories and those of steps that the ledger no longer keeps; return them."""
    removed = checkpoints.remove_unfinished(runs_dir)
    runs = ledger.list_runs()
    ended = (RunState.CLOSED, RunState.FAILED, RunState.DAMAGED)
    served = {run.name for run in runs if run.state not in ended}
    for merged in sorted(runs_dir.glob(f"*/{checkpoints.MERGED}")):
        if merged.parent.name not in served and checkpoints.remove_merged(merged.parent):
            removed.append(merged)
    kept = ledger.kept_steps()
    for run in runs:
        run_dir = checkpoints.run_directory(runs_dir, run.name)
        for step in sorted(checkpoints.steps_on_disk(run_dir) - kept.get(run.name, set())):
            if 0 < step <= run.step:
                checkpoints.remove(run_dir, step)
                removed.append(checkpoints.checkpoint_path(run_dir, step))
    return removed
