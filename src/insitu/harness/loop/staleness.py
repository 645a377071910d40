"""Staleness: which groups may start, and which finished ones a step takes, while another step trains.

    examples of the pass ── may_start ──► running ──► finished ── admit ──► a step, in training
                            (capacity)                  └─ too old: dropped, by age or by KL

Pure functions. The age of a group is the number of steps between the weights that answered its oldest call
and the weights that it would train: what the backend bounds with `training.max_staleness`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Cause = Literal["age", "kl"]
"""Too old for `training.max_staleness`, or for the bound that `finetuning.max_mismatch_kl` has lowered."""

NUM_DECILES = 10


@dataclass(frozen=True, slots=True)
class Bounds:
    """The age up to which a group is trained on."""

    largest: int
    """`training.max_staleness`."""
    now: int
    """The same, or less while `mismatch/kl` is too large."""

    def exceeded(self, oldest: int | None, version: int) -> Cause | None:
        """Return why a group is too old to train the weights of step `version`; None if it is not.

        `oldest`: the step of the weights that answered its oldest call; None without a call.
        """
        age = 0 if oldest is None else version - oldest
        if age > self.largest:
            return "age"
        return "kl" if age > self.now else None


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A finished group, as far as its admission depends on it."""

    index: int
    """The position of its example in the dataset."""
    oldest: int | None
    """The step of the weights that answered its oldest call; None without a call."""
    informative: bool
    """True if it teaches something."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The groups that a step uses up, by the positions of their examples, in the order of their start."""

    trained: list[int]
    uninformative: list[int] = field(default_factory=list[int])
    stale: dict[int, Cause] = field(default_factory=dict[int, Cause])

    @property
    def used(self) -> set[int]:
        """All of them."""
        return {*self.trained, *self.uninformative, *self.stale}


def may_start(
    under_way: Sequence[int],
    groups_per_step: int,
    bound: int,
    *,
    training: bool,
    steps_left: int | None = None,
) -> bool:
    """Return True if a group that starts now would be trained on within the bound.

    `under_way`: groups that run or wait for a step, in each epoch up to the new group's own. Groups that
    teach nothing or are too old do not count, so others start in their place. A step takes groups of one
    epoch, so the rest of an epoch counts as a whole step.

    Within one epoch this is the usual rule: groups started, without those dropped, are at most
    (bound + version + 1) × groups_per_step. `steps_left`: updates that the run may still begin to collect.
    """
    steps_before = training + sum(math.ceil(count / groups_per_step) for count in under_way[:-1])
    steps_before += under_way[-1] // groups_per_step
    return steps_before <= bound and (steps_left is None or steps_before < steps_left)


def admit(
    finished: Sequence[FinishedGroup], version: int, bounds: Bounds, groups_per_step: int, *, more: bool
) -> Admission | None:
    """Return the groups of an epoch's next step; None if the step must wait for others.

    `finished`: the epoch's unused groups in the order of their start. A step takes the first
    `groups_per_step` that teach something, and the last step of an epoch what is left. `more`: True while
    groups of the epoch run or are to start.
    """
    stale: dict[int, Cause] = {
        each.index: cause for each in finished if (cause := stale_by(each, version, bounds))
    }
    informative = [each.index for each in finished if each.informative and each.index not in stale]
    if more and len(informative) < groups_per_step:
        return None
    uninformative = [each.index for each in finished if not each.informative]
    return Admission(informative[:groups_per_step], uninformative, stale)


def stale_by(group: FinishedGroup, version: int, bounds: Bounds) -> Cause | None:
    """Return why a group that teaches something is too old; None if it is not, or teaches nothing anyway."""
    return bounds.exceeded(group.oldest, version) if group.informative else None


def bounds_after(
    steps: Iterable[Mapping[str, float | None]], largest: int, max_kl: float | None = None
) -> Bounds:
    """Return the bounds for the next step, given the backend's figures of all steps so far.

    A step whose `mismatch/kl` is above `max_kl` lowers the bound below the age of its oldest group; each
    other step raises it by one again. A step without that figure leaves the bound as it is.
    """
    now = largest
    for figures in steps:
        kl = figures.get("mismatch/kl")
        if max_kl is None or kl is None:
            continue
        oldest = figures.get("staleness/max")
        reached = now if oldest is None else min(now, int(oldest))
        now = max(0, reached - 1) if kl > max_kl else min(largest, now + 1)
    return Bounds(largest, now)


def by_length_decile(lengths: Iterable[int], among: Iterable[int]) -> list[int]:
    """Count lengths by their decile among others, the shortest tenth first.

    Dropping what is old is biased against what takes long: then the last counts are the largest.
    """
    ranked = sorted(among)
    counts = [0] * NUM_DECILES
    for length in lengths:
        share = bisect_left(ranked, length) / max(1, len(ranked))
        counts[min(NUM_DECILES - 1, int(share * NUM_DECILES))] += 1
    return counts
