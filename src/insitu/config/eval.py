"""`eval`: the dataset, how it is run, and what scores the outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from insitu.config.entries import DatasetEntry, EvaluatorEntry
from insitu.config.values.problems import NOT_HONOURED
from insitu.json_values import as_object
from insitu.plugins import Section

Value = TypeVar("Value")


def _asks_for_something(value: object) -> bool:
    settings = as_object(value)
    if settings is not None:
        return any(_asks_for_something(each) for key, each in settings.items() if key != "eviction_policy")
    return bool(value)


def _without_effect(reason: str) -> AfterValidator:
    """Accept a key of the original that has no effect here, as long as it asks for nothing."""

    def check(value: Value) -> Value:
        if _asks_for_something(value):
            raise PydanticCustomError(NOT_HONOURED, "{text}", {"text": f"has no effect here: {reason}"})
        return value

    return AfterValidator(check)


class EvalOutput(Section):
    """Destination of the results."""

    dir: Path | None = None
    """Overrides `output_dir`."""
    cleanup: bool = True
    """Accepted either way: every evaluation writes to its own files, so nothing has to be deleted."""
    job_management: Annotated[object, _without_effect("evaluations are not run as queued jobs")] = Field(
        default=None, exclude=True
    )
    """Without effect here; accepted while it asks for nothing."""
    remote_dir: Annotated[object, _without_effect("results stay on this machine")] = Field(
        default=None, exclude=True
    )
    """Without effect here; accepted while it asks for nothing."""
    s3: Annotated[object, _without_effect("results stay on this machine")] = Field(default=None, exclude=True)
    """Without effect here; accepted while it asks for nothing."""
    custom_scripts: Annotated[object, _without_effect("run the script after the command")] = Field(
        default=None, exclude=True
    )
    """Without effect here; accepted while it asks for nothing."""
    workflow_output_step_filter: Annotated[object, _without_effect("every model call is recorded")] = Field(
        default=None, exclude=True
    )
    """Without effect here; accepted while it asks for nothing."""


class EvalGeneral(Section):
    """Settings for running the dataset."""

    max_concurrency: int = Field(default=8, ge=1)
    """Rollouts that run at once."""
    output_dir: Path | None = None
    """Also write the outputs and scores of every epoch and validation here."""
    output: EvalOutput = EvalOutput()
    """Destination of the results."""
    dataset: DatasetEntry | None = None
    """The examples."""
    cluster_key: str | None = Field(default=None, min_length=1)
    """Field of a row that names what it belongs to, such as its document, customer or template. Examples with
    the same value are not independent: intervals draw them together."""
    workflow_alias: str | None = None
    """The title of the plot."""
    evaluator_timeout_seconds: float = Field(default=120.0, gt=0)
    """Time for scoring one rollout or group."""
    profiler: Annotated[
        object, _without_effect("timings and token counts of every call are recorded without it")
    ] = Field(default=None, exclude=True)
    """Without effect here; accepted while it asks for nothing."""
    per_input_user_id: Annotated[bool, _without_effect("every rollout has an id of its own")] = False
    """Without effect here; accepted while it asks for nothing."""

    @property
    def results_dir(self) -> Path | None:
        """`output.dir`, which overrides `output_dir`."""
        return self.output.dir or self.output_dir


class EvalConfig(Section):
    """Dataset and evaluators."""

    general: EvalGeneral = EvalGeneral()
    """The dataset and how it is run."""
    evaluators: dict[str, EvaluatorEntry] = Field(default_factory=dict[str, EvaluatorEntry])
    """Rewards by name; `finetuning.reward_function` selects one."""
