"""Counters and their text for Prometheus: the exposition format 0.0.4, which every version of it reads."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of latencies: a call of a model takes from milliseconds to minutes."""
Labels = Mapping[str, str]
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric with its samples: the end of each sample's name, its labels, its value."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: Iterable[tuple[str, Labels, float]]


def counter(name: str, help_text: str, label: str, counts: Mapping[str, int]) -> Metric:
    """Return a counter with one label."""
    return Metric(name, "counter", help_text, [("", {label: key}, n) for key, n in sorted(counts.items())])


def total(name: str, help_text: str, value: float) -> Metric:
    """Return a counter without labels."""
    return Metric(name, "counter", help_text, [("", {}, value)])


def gauge(name: str, help_text: str, value: float) -> Metric:
    """Return a gauge without labels."""
    return Metric(name, "gauge", help_text, [("", {}, value)])


def gauges(name: str, help_text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a gauge with one label."""
    return Metric(name, "gauge", help_text, [("", {label: key}, n) for key, n in sorted(values.items())])


@dataclass(slots=True)
class Latencies:
    """A histogram of seconds. `observe` is on the hot path: one search in twelve bounds, two additions."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    sum: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds

    def samples(self, labels: Labels) -> Iterator[tuple[str, Labels, float]]:
        """Yield the cumulative buckets, the sum and the count."""
        below = 0
        for bound, count in zip((*map(str, SECONDS), "+Inf"), self.counts, strict=True):
            below += count
            yield "_bucket", {**labels, "le": bound}, below
        yield "_sum", labels, self.sum
        yield "_count", labels, below


def exposition(metrics: Iterable[Metric]) -> bytes:
    """Return the text of all metrics."""
    return "".join(f"{line}\n" for metric in metrics for line in _lines(metric)).encode()


def merged(counts: Mapping[tuple[str, str], int], names: tuple[str, str]) -> list[tuple[str, Labels, float]]:
    """Return the samples of a counter with two labels."""
    return [("", dict(zip(names, key, strict=True)), count) for key, count in sorted(counts.items())]


def _lines(metric: Metric) -> Iterator[str]:
    yield f"# HELP {metric.name} {metric.help}"
    yield f"# TYPE {metric.name} {metric.kind}"
    for end, labels, value in metric.samples:
        listed = ",".join(f'{name}="{text.translate(_ESCAPES)}"' for name, text in labels.items())
        yield f"{metric.name}{end}{f'{{{listed}}}' if listed else ''} {+value}"  # a bool as a number
