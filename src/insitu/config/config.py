"""The root model of a configuration file."""

from __future__ import annotations

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from insitu.config.entries import (
    SinkEntry,
    TrainerAdapterEntry,
    TrainerEntry,
    TrajectoryBuilderEntry,
    WorkflowEntry,
)
from insitu.config.eval import EvalConfig
from insitu.config.finetuning import FinetuningConfig
from insitu.config.llms import LLMConfig
from insitu.config.references import reference_problems
from insitu.config.values.problems import validation_error
from insitu.plugins import Section


class Config(Section):
    """The contents of one YAML file."""

    llms: dict[str, LLMConfig] = Field(default_factory=dict[str, LLMConfig])
    """The models that the agent calls, by name."""
    functions: dict[str, WorkflowEntry] = Field(default_factory=dict[str, WorkflowEntry])
    """Parts of the agent, by name; called with `context.call`."""
    workflow: WorkflowEntry | None = None
    """The agent."""
    eval: EvalConfig = EvalConfig()
    """The dataset and the rewards."""
    trajectory_builders: dict[str, TrajectoryBuilderEntry] = Field(
        default_factory=dict[str, TrajectoryBuilderEntry]
    )
    """Sources of rollouts, by name."""
    trainer_adapters: dict[str, TrainerAdapterEntry] = Field(default_factory=dict[str, TrainerAdapterEntry])
    """Backends that train, by name."""
    trainers: dict[str, TrainerEntry] = Field(default_factory=dict[str, TrainerEntry])
    """Training loops, by name."""
    finetuning: FinetuningConfig = FinetuningConfig()
    """The training: its parts, its length, its files."""
    sinks: list[SinkEntry] = Field(default_factory=list[SinkEntry])
    """Products that get the run's figures besides its own files; each a mapping or a lone `_type`."""

    @model_validator(mode="wrap")
    @classmethod
    def _references(cls, data: object, handler: ModelWrapValidatorHandler[Config]) -> Config:
        """Check references even when a field is invalid, so that one error lists everything."""
        try:
            config = handler(data)
        except ValidationError as error:
            problems = reference_problems(data)
            if not problems:
                raise
            raise _joined(error, validation_error(problems)) from None
        if problems := reference_problems(config):
            raise validation_error(problems)
        return config


def _joined(*errors: ValidationError) -> ValidationError:
    """Merge errors into one that lists the lines of all."""
    lines = [
        InitErrorDetails(
            type=PydanticCustomError(line["type"], "{text}", {"text": line["msg"]}),  # pyright: ignore[reportArgumentType]
            loc=line["loc"],
            input=line["input"],
        )
        for error in errors
        for line in error.errors(include_url=False)
    ]
    return ValidationError.from_exception_data("configuration", lines, hide_input=True)
