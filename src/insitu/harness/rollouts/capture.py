"""Capture: every model call of a rollout or an epoch by outcome; a proof that none is missing.

    seen (the gateway's own counter) = trained + context-only (by kind) + dropped (by reason)

The left side counts incoming requests; the right side counts recorded, selected and trained calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace

from insitu.errors import InsituError
from insitu.harness.rollouts.fields import counts, whole

OTHER_MODEL = "other_model"
OTHER_FUNCTION = "other_function"
INCOMPLETE_CALL = "incomplete"
UNRECORDED = "unrecorded"
UNFINISHED = "unfinished"
LATE = "late"
_COUNT = "account/calls"


class CaptureMismatch(InsituError):
    """Model calls are missing from the account, or are counted twice."""


@dataclass(frozen=True, slots=True)
class Capture:
    """Model calls by outcome. Captures of different rollouts add up."""

    seen: int = 0
    """Calls counted by the gateway on arrival."""
    uncounted: int = 0
    """Recorded calls of rollouts for which the gateway has no count."""
    trained: int = 0
    """For a single rollout: calls to train on, unless its trajectory is dropped."""
    context_only: dict[str, int] = field(default_factory=dict[str, int])
    """`other_model`, `other_function`."""
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    """By the trajectory's reason or the call's own: `incomplete`, `unrecorded`, `unfinished`, `late`."""

    @property
    def total(self) -> int:
        """All calls known to have been made."""
        return self.seen + self.uncounted

    @property
    def accounted(self) -> int:
        """The sum over all outcomes; if it differs from `total`, calls are missing."""
        return self.trained + sum(self.context_only.values()) + sum(self.dropped.values())

    @property
    def balanced(self) -> bool:
        """True if the calls accounted for add up to `total`."""
        return self.total == self.accounted

    def without_training(self, reason: str) -> Capture:
        """Move the calls to train on to `dropped`, because their trajectory was dropped for `reason`."""
        dropped = _sum(self.dropped, {reason: self.trained})
        return replace(self, trained=0, dropped=dropped)

    def after_training(self, metrics: Mapping[str, float]) -> Capture | None:
        """Return the capture with the backend's counts of trained and dropped calls; None if it has none.

        Raises CaptureMismatch when the backend received a different number of calls than was submitted, or
        does not account for all of them.
        """
        if _COUNT not in metrics:
            return None
        given, trained = int(metrics[_COUNT]), int(metrics.get(f"{_COUNT}_trained", 0))
        dropped_there = {
            name.removeprefix(f"{_COUNT}_"): int(count)
            for name, count in metrics.items()
            if name.startswith(f"{_COUNT}_") and name != f"{_COUNT}_trained"
        }
        accounted = trained + sum(dropped_there.values())
        if given != self.trained or given != accounted:
            parts = ", ".join(f"{count} {_shown(name)}" for name, count in dropped_there.items() if count)
            raise CaptureMismatch(
                f"{self.trained} model calls were submitted for training, and the backend accounts for "
                f"{accounted} of {given}: {trained} trained, {parts or 'none dropped'}",
                hint="the step was trained, but not on these calls: compare account/calls* in the metrics of "
                "the backend's job with `insitu trajectories list OUTPUT_DIR`; start over in another "
                "output_dir",
            )
        return replace(self, trained=trained, dropped=_sum(self.dropped, dropped_there))

    def line(self) -> str:
        """Format as ``calls 9 seen = 5 trained + 2 context-only (other-model 2) + 2 dropped (2 late)``."""
        text = f"calls {self.seen} seen"
        if self.uncounted:
            text += f" and {self.uncounted} not counted by the gateway"
        text += f" = {self.trained} trained"
        if self.context_only:
            kinds = ", ".join(f"{_shown(kind)} {count}" for kind, count in _sorted(self.context_only))
            text += f" + {sum(self.context_only.values())} context-only ({kinds})"
        if self.dropped:
            reasons = ", ".join(f"{count} {_shown(reason)}" for reason, count in _sorted(self.dropped))
            text += f" + {sum(self.dropped.values())} dropped ({reasons})"
        return text

    def to_dict(self) -> dict[str, object]:
        """Serialize for stored rollouts and metrics files; `from_dict` reads it back."""
        return asdict(self)

    @staticmethod
    def from_dict(fields: Mapping[str, object]) -> Capture:
        """Read back the result of `to_dict`; raises TypeError for anything else."""
        return Capture(
            seen=whole(fields.get("seen", 0)),
            uncounted=whole(fields.get("uncounted", 0)),
            trained=whole(fields.get("trained", 0)),
            context_only=counts(fields.get("context_only")),
            dropped=counts(fields.get("dropped")),
        )


def add_up(captures: Iterable[Capture]) -> Capture:
    """Sum the captures of several rollouts or epochs."""
    seen = uncounted = trained = 0
    context_only, dropped = Counter[str](), Counter[str]()
    for capture in captures:
        seen += capture.seen
        uncounted += capture.uncounted
        trained += capture.trained
        context_only.update(capture.context_only)
        dropped.update(capture.dropped)
    return Capture(seen, uncounted, trained, dict(context_only), dict(dropped))


def _sum(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    total = Counter(first)
    total.update(second)
    return {name: count for name, count in total.items() if count}


def _sorted(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _shown(name: str) -> str:
    return name.replace("_", "-")
