"""Read the figures of a run from the events in its journal, under the names of its files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from insitu.harness.files.metrics import validation_fields
from insitu.harness.sinks.sink import Figures
from insitu.json_values import JsonObject, JsonValue, as_object

_STEP, _EPOCH = "step", "epoch"
_PREFIXES = {_STEP: "step", _EPOCH: "epoch", "validated": "validation", "remeasured": "remeasured"}
"""Events with figures, and the first part of the figures' names."""
_LEFT_OUT = ("example_rewards", "group_rewards", "timestamp")
"""As many as the dataset has examples; or the figures' own time."""


class FiguresReader:
    """Numbers the figures of a run, event by event."""

    def __init__(self) -> None:
        self._number = 0
        self._step = 0

    def read(self, record: JsonObject) -> Figures | None:
        """Return the figures of an event; None if it has none."""
        prefix = _PREFIXES.get(str(record.get("event")))
        if prefix is None:
            return None
        self._step += prefix == _STEP
        entry = as_object(record.get("line")) or as_object(record.get("entry")) or {}
        shown = entry if prefix in (_STEP, _EPOCH) else as_object(validation_fields(entry)) or {}
        verdict = as_object(entry.get("verdict"))
        at = record.get("at")
        figures = Figures(
            number=self._number,
            step=self._step,
            time=float(at) if isinstance(at, int | float) else 0.0,
            values=dict(_numbers(prefix, shown)),
            texts={} if verdict is None else {f"{prefix}/verdict": str(verdict.get("sentence"))},
        )
        self._number += 1
        return figures

    def read_all(self, records: Iterable[JsonObject]) -> list[Figures]:
        """Return the figures of the events that have some."""
        return [figures for record in records if (figures := self.read(record)) is not None]


def _numbers(name: str, value: JsonValue) -> Iterator[tuple[str, float]]:
    inside = as_object(value)
    if inside is not None:
        for key, each in inside.items():
            if key not in _LEFT_OUT:
                yield from _numbers(f"{name}/{key}", each)
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield name, value
