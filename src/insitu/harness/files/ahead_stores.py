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

from insitu.harness.files.rollout_store import RolloutStore
from insitu.harness.files.token_file import tokens_beside
from insitu.system.durable import make_directories, sync_path

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
            # Lines first: tokens without lines are cut off when the store is opened again.
            self._file(slot).unlink(missing_ok=True)
            tokens_beside(self._file(slot)).unlink(missing_ok=True)

    def set_aside(self, slots: Iterable[Slot], why: str) -> Path:
        """Move, and so keep, the rollouts of groups that are to be run again; return the folder."""
        for slot in slots:
            path, number = self._file(slot), 1
            while (aside := self._kept_in / f"{slot.name}-{why}-{number}.jsonl").exists():
                number += 1
            make_directories(self._kept_in)
            if (tokens := tokens_beside(path)).exists():
                # First: lines without their tokens can be set aside again, tokens without lines cannot.
                tokens.rename(tokens_beside(aside))
            path.rename(aside)
            sync_path(self._kept_in)
        return self._kept_in

    def _file(self, slot: Slot) -> Path:
        return self._directory / f"{slot.name}.jsonl"
