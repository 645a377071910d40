"""Fall back to a whole checkpoint when a run's last one is damaged.

The run returns to the newest step whose files match the ledger. The steps after it are lost; their jobs are
queued again, so the same groups are trained again, each once, before any later job of the run.
"""

from __future__ import annotations

from pathlib import Path

from insitu.backend.ledger import Ledger
from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.backend.ledger.rows import Run
from insitu.errors import CorruptCheckpoint


def fall_back(ledger: Ledger, runs_dir: Path, run: Run) -> tuple[Run, str]:
    """Take the run back in the ledger; return it with what to tell the user. Raise if no step is whole."""
    kept = {checkpoint.step: checkpoint.manifest_sha256 for checkpoint in ledger.checkpoints(run.name)}
    step, damaged = checkpoints.newest_whole(checkpoints.run_directory(runs_dir, run.name), kept)
    if step is None and 0 not in kept and set(range(1, run.step + 1)) <= kept.keys():
        step = 0  # every step there ever was is at hand to be trained again
    if step is None or step >= run.step:
        found = damaged[0].message if damaged else f"the ledger keeps {sorted(kept)} of {run.step} steps"
        raise CorruptCheckpoint(
            f"run {run.name} has no whole checkpoint left: {found}",
            hint="restore the files and register the run again (POST /v1/runs), or choose another name",
        )
    checkpoints.note_committed(checkpoints.run_directory(runs_dir, run.name), step)
    reason = damaged[0].message if damaged else f"the ledger has no checkpoint of step {run.step}"
    behind = ledger.fall_back(run.name, step, reason)
    lost = f"step {run.step} is" if run.step == step + 1 else f"steps {step + 1} to {run.step} are"
    return behind, f"run {run.name} falls back to step {step}, and {lost} trained again: {reason}"
