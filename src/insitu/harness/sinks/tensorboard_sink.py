"""TensorBoard: event files, written by tensorboardX, which needs no TensorFlow and no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from insitu.harness.sinks.sink import Figures, RunStart, Sink, library
from insitu.plugins import ComponentConfig, Parts


class TensorboardConfig(ComponentConfig):
    """An entry of `sinks` of the type `tensorboard`."""

    path: Path | None = None
    """The folder of the event files; None: `tensorboard` in the run's own folder."""


class TensorboardSink(Sink):
    """Scalars by step, in one folder per run."""

    def __init__(self, config: TensorboardConfig, parts: Parts) -> None:  # noqa: ARG002 - as every component
        self._config = config
        self._library: Any = library("tensorboard", "tensorboardX")
        self._writer: Any = None

    def start(self, run: RunStart) -> str:
        """Open a file; a resumed run has one for each process, which readers join."""
        folder = self._config.path / run.run_id if self._config.path else run.directory / "tensorboard"
        self._writer = self._library.SummaryWriter(str(folder))
        if run.known_as is None:
            about = orjson.dumps({"config": run.config, "lineage": run.lineage}, option=orjson.OPT_INDENT_2)
            self._writer.add_text("config", f"```json\n{about.decode()}\n```", 0)
        return str(folder)

    def figures(self, figures: Figures) -> None:
        """Write scalars and texts, and flush them."""
        for name, value in figures.values.items():
            self._writer.add_scalar(name, value, figures.step, figures.time)
        for name, text in figures.texts.items():
            self._writer.add_text(name, text, figures.step, figures.time)
        self._writer.flush()

    def end(self, outcome: str) -> None:  # noqa: ARG002 - event files have no place for it
        """Close the file."""
        self._writer.close()
