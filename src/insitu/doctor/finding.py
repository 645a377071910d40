"""The result of one check: a state, figures with their bounds and, after a failure, the next command."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from insitu.errors import InsituError, one_line
from insitu.wire.message import Message

State = Literal["ok", "failed", "skipped"]

NO_CUDA = "no CUDA device"

_NAME_WIDTH = 28


@dataclass(frozen=True, slots=True)
class Figure(Message):
    """A measured value; without a bound it is for information."""

    name: str
    measured: float | None
    """None for NaN and infinity."""
    bound: float | None = None
    unit: str = ""

    @property
    def holds(self) -> bool:
        """True within the bound; NaN is not."""
        return self.bound is None or (self.measured is not None and self.measured <= self.bound)

    def __str__(self) -> str:
        measured = "not finite" if self.measured is None else f"{self.measured:.3g}"
        unit = f" {self.unit}" if self.unit else ""
        bound = "" if self.bound is None else f" (bound {self.bound:.3g})"
        return f"{self.name} {measured}{unit}{bound}"


@dataclass(frozen=True, slots=True)
class Finding(Message):
    """One line of the report."""

    name: str
    state: State
    figures: list[Figure] = field(default_factory=list[Figure])
    detail: str = ""
    hint: str = ""
    """The next command; only after a failure."""

    def line(self) -> str:
        """Show the finding on one line."""
        said = ", ".join(filter(None, [*map(str, self.figures), self.detail]))
        text = f"{self.state:<8}{self.name:<{_NAME_WIDTH}}{said}"
        return f"{text}; next: {self.hint}" if self.hint else text


def measured(name: str, figures: list[Figure], *, hint: str, detail: str = "") -> Finding:
    """Judge figures by their bounds."""
    holds = all(figure.holds for figure in figures)
    return Finding(name, "ok" if holds else "failed", figures, detail, "" if holds else hint)


def failed(name: str, error: InsituError, *, hint: str) -> Finding:
    """Report a check that ended with an error; the error's own hint comes first."""
    return Finding(name, "failed", detail=one_line(error.message), hint=error.hint or hint)


def skipped(name: str, reason: str) -> Finding:
    """Report a check that this machine cannot run."""
    return Finding(name, "skipped", detail=reason)
