"""AheadStores: the rollouts of groups that no step has used yet, a file of lines and one of tokens per group.

    ahead/epoch-0000-example-000012.jsonl ── its step is formed ──► trajectories/epoch-0000-step-0003.jsonl

With `finetuning.schedule: asynchronous` nobody knows which step a group will belong to when it starts. Once a
step has the group's rollouts and the journal says so, the group's own files go.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from insitu.harness.files.rollout_store import RolloutStore, free_name, move_rollouts, remove_rollouts
from insitu.system.durable import make_directories

AHEAD = "ahead"
_NAME = re.compile(r"epoch-(\d+)-example-(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """The place of a group in a run."""

    epoch: int
    index: int
    """The position of its example in the dataset."""

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"epoch-{self.epoch:04d}-example-{self.index:06d}"


class AheadStores:
    """The folder `ahead/` of a run directory."""

    def __init__(self, directory: Path, kept_in: Path) -> None:
        """`kept_in`: the folder for rollouts that are set aside."""
        self._directory = directory
        self._kept_in = kept_in

    def open(self, slot: Slot) -> RolloutStore:
        """Open the store of a group; the caller closes it."""
        make_directories(self._directory)
        return RolloutStore(self._file(slot))

    def found(self) -> list[Slot]:
        """Return the groups that have a store, in order."""
        names = (_NAME.fullmatch(file.stem) for file in self._directory.glob("*.jsonl"))
        return sorted(Slot(int(name[1]), int(name[2])) for name in names if name)

    def has_results(self) -> bool:
        """Return True if a rollout is stored."""
        return any(file.stat().st_size for file in self._directory.glob("*.jsonl"))

    def remove(self, slots: Iterable[Slot]) -> None:
        """Remove the stores of groups whose rollouts a step has, or that nothing was stored for."""
        for slot in slots:
            remove_rollouts(self._file(slot))

    def set_aside(self, slots: Iterable[Slot], why: str) -> Path:
        """Move, and so keep, the rollouts of groups that are to be run again; return the folder."""
        for slot in slots:
            make_directories(self._kept_in)
            move_rollouts(self._file(slot), free_name(self._kept_in, slot.name, why))
        return self._kept_in

    def _file(self, slot: Slot) -> Path:
        return self._directory / f"{slot.name}.jsonl"
