"""StoreName: what the name of a file of rollouts says, and what people call the file."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    aside: str = ""
    """Of rollouts that were set aside: why, and which time, as `failed 1`."""

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
            return StoreName(name, "set_aside", epoch, of_epoch, aside.strip("-").replace("-", " "))
        if what == "epoch":
            return StoreName(name, "training", epoch, of_epoch)
        return StoreName(name, "remeasured" if what == "remeasured" else "validation", epoch)

    def label(self, steps: Mapping[tuple[int, int], int], validations: Mapping[str, int]) -> str:
        """Return what people call the file.

        `steps` has the number of each step by its epoch and its place there, `validations` the step of the
        weights that a validation measured, by the file's name.
        """
        if self.kind in ("validation", "remeasured"):
            what = "validation, measured again" if self.kind == "remeasured" else "validation"
            step = validations.get(self.name)
            if step is None:
                return f"{what}, under way"
            return f"{what} after step {step}" if step else f"{what} before training"
        if self.epoch is None:
            return self.name
        number = steps.get((self.epoch, self.step_of_epoch or 0))
        place = f"epoch {self.epoch + 1}" if number is None else f"step {number}"
        if self.aside:
            return f"{place}, set aside ({self.aside})"
        return place if number is not None else f"{place}, under way"
