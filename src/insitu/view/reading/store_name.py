"""StoreName: what the name of a file of rollouts says."""

from __future__ import annotations

import re
from dataclasses import dataclass

from insitu.wire.views.runs import StoreKind

_NAME = re.compile(r"(epoch|validation|remeasured)-(\d+)(?:-step-(\d+))?(-[a-z]+-\d+)?")


@dataclass(frozen=True, slots=True)
class StoreName:
    """The kind of a file of rollouts, and its place in the run."""

    name: str
    kind: StoreKind
    epoch: int | None = None
    step_of_epoch: int | None = None
    """Within the epoch, from 0; of training only."""

    @staticmethod
    def of(name: str) -> StoreName:
        """Read a name such as `epoch-0003-step-0001`, `validation-0005` or `epoch-0003-failed-1`."""
        found = _NAME.fullmatch(name)
        if found is None:
            return StoreName(name, "set_aside")
        what, number, step, aside = found.groups()
        epoch = None if what == "remeasured" else int(number)
        of_epoch = int(step or 0) if what == "epoch" else None
        if aside is not None:
            return StoreName(name, "set_aside", epoch, of_epoch)
        if what == "epoch":
            return StoreName(name, "training", epoch, of_epoch)
        return StoreName(name, "remeasured" if what == "remeasured" else "validation", epoch)
