"""LossScale: the factor that keeps gradients within the range of float16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_FIRST = 1024.0
_LEAST, _MOST = 1.0, 2.0**24
_GROWTH_UPDATES = 200
"""Growing costs an update where it goes too far: one in this many at most."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """A run's scale: halved after an update that was not finite, doubled after many good ones.

    Every rank sees the same summed gradient, so all keep the same scale.
    """

    value: float = _FIRST
    good_updates: int = 0
    """Since the scale last changed."""

    def after(self, *, skipped: bool) -> LossScale:
        """Return the scale after an update."""
        if skipped:
            return LossScale(max(_LEAST, self.value / 2))
        if self.good_updates + 1 < _GROWTH_UPDATES:
            return LossScale(self.value, self.good_updates + 1)
        return LossScale(min(_MOST, self.value * 2))

    @staticmethod
    def read(fields: Mapping[str, float] | None) -> LossScale:
        """Read the scale of a checkpoint; those of earlier releases have none."""
        if fields is None:
            return LossScale()
        return LossScale(float(fields["value"]), int(fields["good_updates"]))
