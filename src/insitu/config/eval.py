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
    cleanup: bool = True
    """Accepted either way: every evaluation writes to its own files, so nothing has to be deleted."""
    job_management: Annotated[object, _without_effect("evaluations are not run as queued jobs")] = Field(
        default=None, exclude=True
    )
    remote_dir: Annotated[object, _without_effect("results stay on this machine")] = Field(
        default=None, exclude=True
    )
    s3: Annotated[object, _without_effect("results stay on this machine")] = Field(default=None, exclude=True)
    custom_scripts: Annotated[object, _without_effect("run the script after the command")] = Field(
        default=None, exclude=True
    )
    workflow_output_step_filter: Annotated[object, _without_effect("every model call is recorded")] = Field(
        default=None, exclude=True
    )


class EvalGeneral(Section):
    """Settings for running the dataset."""

    max_concurrency: int = Field(default=8, ge=1)
    output_dir: Path | None = None
    output: EvalOutput = EvalOutput()
    dataset: DatasetEntry | None = None
    workflow_alias: str | None = None
    evaluator_timeout_seconds: float = Field(default=120.0, gt=0)
    profiler: Annotated[
        object, _without_effect("timings and token counts of every call are recorded without it")
    ] = Field(default=None, exclude=True)
    per_input_user_id: Annotated[bool, _without_effect("every rollout has an id of its own")] = False

    @property
    def results_dir(self) -> Path | None:
        """`output.dir`, which overrides `output_dir`."""
        return self.output.dir or self.output_dir


class EvalConfig(Section):
    """Dataset and evaluators."""

    general: EvalGeneral = EvalGeneral()
    evaluators: dict[str, EvaluatorEntry] = Field(default_factory=dict[str, EvaluatorEntry])
