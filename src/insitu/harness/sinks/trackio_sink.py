"""Trackio: a SQLite database in TRACKIO_DIR, shown by `trackio show`."""

from __future__ import annotations

from typing import Any

from insitu.harness.sinks.sink import Figures, RunStart, Sink, library
from insitu.plugins import ComponentConfig, Parts


class TrackioConfig(ComponentConfig):
    """An entry of `sinks` of the type `trackio`."""

    project: str = "insitu"
    """The project in Trackio."""


class TrackioSink(Sink):
    """Rows of a Trackio run."""

    def __init__(self, config: TrackioConfig, parts: Parts) -> None:  # noqa: ARG002 - as every component
        self._config = config
        self._trackio: Any = library("trackio", "trackio")
        self._run: Any = None

    def start(self, run: RunStart) -> str:
        """Open the run; a resumed one goes on under its name."""
        name = run.known_as or f"{run.name}-{run.run_id}"
        self._run = self._trackio.init(
            project=self._config.project,
            name=name,
            config={"insitu": run.config, "lineage": run.lineage},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return name

    def figures(self, figures: Figures) -> None:
        """Add a row at the figures' step."""
        self._run.log({**figures.values, **figures.texts}, step=figures.step)

    def end(self, outcome: str) -> None:  # noqa: ARG002 - a Trackio run has no outcome
        """Write what is left."""
        self._run.finish()
