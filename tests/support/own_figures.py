"""The figures of a run as its own files have them, to be compared with those that a sink got."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tests.support.finetuning import Project

Series = dict[str, list[tuple[int, float]]]
"""Steps and values by name."""


def own_figures(project: Project) -> Series:
    """Read steps.jsonl, training_metrics.jsonl and validation_history.json; every step must have trained."""
    series: Series = defaultdict(list)
    steps = project.lines("steps.jsonl")
    for number, line in enumerate(steps, 1):
        assert line["step"] == number
        _add(series, "step", number, line)
    for line in project.lines("training_metrics.jsonl"):
        if line.get("complete", True):
            _add(series, "epoch", line["step"], line)
    for entry in project.json("validation_history.json"):
        again = entry.get("remeasured", False)
        _add(series, "remeasured" if again else "validation", len(steps) if again else entry["step"], entry)
    return dict(series)


def _add(series: Series, prefix: str, step: int, line: dict[str, Any]) -> None:
    for name, value in _numbers(prefix, line):
        series[name].append((step, value))


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key not in ("example_rewards", "group_rewards"):
                yield from _numbers(f"{name}/{key}", each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value
