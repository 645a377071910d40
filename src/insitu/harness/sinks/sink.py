"""Sink: the interface to a product that shows the figures of runs."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from insitu.errors import InvalidRequest, foreign_code
from insitu.harness.rollouts.rollout import Rollout
from insitu.json_values import JsonObject
from insitu.system.torch_builds.installing import install_command


@dataclass(frozen=True, slots=True)
class RunStart:
    """A run as a product sees it at the beginning."""

    run_id: str
    name: str
    """The name of the run on the backend."""
    directory: Path
    config: JsonObject
    """The effective configuration, without secrets."""
    lineage: JsonObject
    """The base model, the start of the run, and the hashes of its files and datasets."""
    known_as: str | None = None
    """The product's id of the run, if an earlier process has opened it there."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One line of steps.jsonl or training_metrics.jsonl, or one validation, as numbers by name."""

    number: int
    """Its place among all figures of the run, from 0."""
    step: int
    """The number of steps that were over, so never less than that of the figures before."""
    time: float
    """Unix time."""
    values: Mapping[str, float]
    """By name: `step/avg_reward`, `epoch/account/trained`, `validation/avg_reward`."""
    texts: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class SentRollout:
    """A finished rollout and the name of its store, such as `epoch-0003`."""

    store: str
    rollout: Rollout


class Sink:
    """One product. Its methods are called one at a time, in a thread of the sink's own, and may block.

    An exception costs what was to be sent: it is counted and reported, and the run goes on.
    """

    takes_rollouts: bool = False
    """True if `rollouts` is to be called."""

    def start(self, run: RunStart) -> str | None:
        """Open the run, or open it again as `run.known_as`; return its id there."""
        raise NotImplementedError

    def figures(self, figures: Figures) -> None:
        """Send figures. They are kept when this returns."""

    def rollouts(self, rollouts: Sequence[SentRollout]) -> None:
        """Send finished rollouts, in the order in which they ended."""

    def end(self, outcome: str) -> None:
        """Close the run: "succeeded", "failed" or "interrupted"."""


def library(name: str, package: str) -> ModuleType:
    """Import the library of a sink; InvalidRequest says how to install it."""

    def missing(error: BaseException) -> InvalidRequest:
        return InvalidRequest(
            f"the sink `{name}` needs the package {package}: {type(error).__name__}: {error}",
            hint=f"{install_command(package)}; or take the sink out of `sinks`",
        )

    with foreign_code(missing):
        return importlib.import_module(package)
