"""Sinks: all sinks of one run, from its start to its end."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from types import TracebackType
from typing import Self

from insitu.config.config import Config
from insitu.config.dump import dump_config
from insitu.harness.files.run_directory import SINKS, RunDirectory
from insitu.harness.files.watcher import RunWatcher
from insitu.harness.interfaces.progress import Progress
from insitu.harness.interfaces.run_input import RunInput
from insitu.harness.interfaces.trained_model import TrainedModel
from insitu.harness.rollouts.rollout import Rollout
from insitu.harness.sinks.feed import SinkFeed
from insitu.harness.sinks.figures import FiguresReader
from insitu.harness.sinks.sink import RunStart, SentRollout, Sink
from insitu.json_values import JsonObject
from insitu.plugins import ComponentConfig
from insitu.system.durable import make_directories
from insitu.system.threads import run_in_daemon_thread
from insitu.types import SCORED

CLOSE_SECONDS = 30.0
"""All sinks together have this long to send what is queued at the end of a run."""


class Sinks(RunWatcher):
    """Passes what a run writes to its sinks. Use it as `async with`; set `outcome` before it ends."""

    def __init__(
        self,
        built: Sequence[tuple[ComponentConfig, Sink]],
        directory: RunDirectory,
        start: RunStart,
        progress: Progress,
    ) -> None:
        self.outcome = "failed"
        self._directory = directory
        self._progress = progress
        self._reader = FiguresReader()
        self._feeds = [
            SinkFeed(config.type_name, sink, directory.path / SINKS / _file_name(config), start)
            for config, sink in built
        ]

    async def __aenter__(self) -> Self:
        if self._feeds:
            make_directories(self._directory.path / SINKS)
            history = self._reader.read_all(self._directory.journal.records())
            for feed in self._feeds:
                feed.start(history)
            self._directory.watch(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._directory.watch(RunWatcher())
        await asyncio.shield(run_in_daemon_thread(self._close))
        for feed in self._feeds:
            self._say_end(feed)

    def noted(self, record: JsonObject) -> None:
        """Pass the figures of an event on, and warn of new troubles."""
        figures = self._reader.read(record)
        for feed in self._feeds:
            if figures is not None:
                feed.offer(figures)
            for reason in feed.new_troubles():
                self._progress.warn(
                    f"sink {feed.name}: {reason}; the run goes on, its own files are complete"
                )

    def stored(self, name: str, rollout: Rollout) -> None:
        """Pass a rollout on, unless its group is still to be scored."""
        if rollout.reward is None and rollout.ending in SCORED:
            return
        for feed in self._feeds:
            if feed.takes_rollouts:
                feed.offer(SentRollout(name, rollout))

    def _close(self) -> None:
        deadline = time.monotonic() + CLOSE_SECONDS
        for feed in self._feeds:
            feed.end(self.outcome)
        for feed in self._feeds:
            feed.join(deadline)

    def _say_end(self, feed: SinkFeed) -> None:
        rollouts = f" and {feed.num_rollouts} rollouts" if feed.takes_rollouts else ""
        known_as = f" (run {feed.known_as})" if feed.known_as else ""
        self._progress.info(f"sink {feed.name}{known_as}: {feed.num_figures} figures{rollouts} sent")
        for reason, count in feed.dropped().items():
            self._progress.warn(f"sink {feed.name}: {count} not sent: {reason}")


def run_start(
    config: Config, directory: RunDirectory, model: TrainedModel, inputs: Sequence[RunInput]
) -> RunStart:
    """Describe a run to its sinks."""
    lineage: JsonObject = {
        "insitu": version("insitu"),
        "base_model": model.base_model,
        "starts_from": model.start or model.base_model,
        "inputs": [{key: str(value) for key, value in asdict(each).items()} for each in inputs],
    }
    return RunStart(directory.run_id, model.name, directory.path, dump_config(config), lineage)


def _file_name(config: ComponentConfig) -> str:
    """Name the state of a sink after its settings: with others it is another run there."""
    settings = json.dumps(config.model_dump(mode="json", by_alias=True), sort_keys=True)
    return f"{config.type_name}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}.json"
