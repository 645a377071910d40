"""Weights & Biases. The key is its own: WANDB_API_KEY or `wandb login`; WANDB_MODE=offline needs none."""

from __future__ import annotations

from typing import Any

from insitu.errors import InvalidRequest
from insitu.harness.sinks.sink import Figures, RunStart, Sink, library
from insitu.plugins import ComponentConfig, Parts

_OPEN_SECONDS = 60.0
STEP = "insitu_step"
"""The horizontal axis of every figure."""


class WandbConfig(ComponentConfig):
    """An entry of `sinks` of the type `wandb`."""

    project: str = "insitu"
    """The project in W&B."""
    entity: str | None = None
    """The user or team; None: the default one of the key."""


class WandbSink(Sink):
    """One row of a W&B run's history for each line of figures."""

    def __init__(self, config: WandbConfig, parts: Parts) -> None:  # noqa: ARG002 - as every component
        self._config = config
        self._wandb: Any = library("wandb", "wandb")
        self._run: Any = None
        mode = self._wandb.setup().settings.mode
        if mode == "online" and not self._wandb.api.api_key:
            raise InvalidRequest(
                "the sink `wandb` has no key",
                hint="export WANDB_API_KEY=…, or run `wandb login`; WANDB_MODE=offline keeps the run on disk",
            )

    def start(self, run: RunStart) -> str:
        """Open the run; a resumed one goes on under the same id."""
        known_as = run.known_as or run.run_id
        self._run = self._wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            id=known_as,
            name=f"{run.name} {run.run_id}",
            dir=str(run.directory),
            config={"insitu": run.config, "lineage": run.lineage},
            resume="allow",
            # Nothing but figures: no terminal output, no code, no figures of the machine.
            settings=self._wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
                init_timeout=_OPEN_SECONDS,
            ),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        return known_as

    def figures(self, figures: Figures) -> None:
        """Add a row."""
        self._run.log({STEP: figures.step, **figures.values})
        self._run.summary.update(figures.texts)

    def end(self, outcome: str) -> None:
        """Wait until everything is uploaded, and finish the run."""
        self._run.finish(exit_code=0 if outcome == "succeeded" else 1)
