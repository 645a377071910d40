"""MLflow, at MLFLOW_TRACKING_URI or its default place. Its keys are in its own variables, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from insitu.harness.sinks.sink import Figures, RunStart, Sink, library
from insitu.json_values import JsonValue
from insitu.plugins import ComponentConfig, Parts

_PARAMS_AT_ONCE = 100
_MAX_PARAM_CHARS = 500
_STATUS = {"succeeded": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MlflowConfig(ComponentConfig):
    """An entry of `sinks` of the type `mlflow`."""

    experiment: str = "insitu"
    """The experiment; it is created if it is not there."""


class MlflowSink(Sink):
    """Metrics of an MLflow run, with the configuration as parameters."""

    def __init__(self, config: MlflowConfig, parts: Parts) -> None:  # noqa: ARG002 - as every component
        self._config = config
        self._mlflow: Any = library("mlflow", "mlflow")
        self._client: Any = None
        self._id = ""

    def start(self, run: RunStart) -> str:
        """Create the run, or set it running again."""
        self._client = self._mlflow.MlflowClient()
        if run.known_as is not None:
            self._id = run.known_as
            self._client.update_run(self._id, status="RUNNING")
            return self._id
        name = self._config.experiment
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        created = self._client.create_run(experiment, run_name=f"{run.name} {run.run_id}")
        self._id = str(created.info.run_id)
        self._log_params({**run.config, "lineage": run.lineage})
        return self._id

    def figures(self, figures: Figures) -> None:
        """Log the figures at their step, and texts as tags."""
        entities = self._mlflow.entities
        at = int(figures.time * 1000)
        metrics = [entities.Metric(name, value, at, figures.step) for name, value in figures.values.items()]
        tags = [entities.RunTag(name.replace("/", "."), text) for name, text in figures.texts.items()]
        self._client.log_batch(self._id, metrics=metrics, tags=tags)

    def end(self, outcome: str) -> None:
        """Set the run's status."""
        self._client.set_terminated(self._id, status=_STATUS[outcome])

    def _log_params(self, config: JsonValue) -> None:
        param = self._mlflow.entities.Param
        params = [param(name, value[:_MAX_PARAM_CHARS]) for name, value in _leaves("", config)]
        for first in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=params[first : first + _PARAMS_AT_ONCE])


def _leaves(name: str, value: JsonValue) -> Iterator[tuple[str, str]]:
    """Yield the values of nested mappings and lists by their dotted names."""
    inside = dict(enumerate(value)) if isinstance(value, list) else value
    if not isinstance(inside, dict):
        yield name, str(value)
        return
    for key, each in inside.items():
        yield from _leaves(f"{name}.{key}" if name else str(key), each)
