"""The root model of a configuration file."""

from __future__ import annotations

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from insitu.config.entries import TrainerAdapterEntry, TrainerEntry, TrajectoryBuilderEntry, WorkflowEntry
from insitu.config.eval import EvalConfig
from insitu.config.finetuning import FinetuningConfig
from insitu.config.llms import LLMConfig
from insitu.config.references import reference_problems
from insitu.config.values.problems import validation_error
from insitu.plugins import Section


class Config(Section):
    """The contents of one YAML file."""

    llms: dict[str, LLMConfig] = Field(default_factory=dict[str, LLMConfig])
    functions: dict[str, WorkflowEntry] = Field(default_factory=dict[str, WorkflowEntry])
    workflow: WorkflowEntry | None = None
    eval: EvalConfig = EvalConfig()
    trajectory_builders: dict[str, TrajectoryBuilderEntry] = Field(
        default_factory=dict[str, TrajectoryBuilderEntry]
    )
    trainer_adapters: dict[str, TrainerAdapterEntry] = Field(default_factory=dict[str, TrainerAdapterEntry])
    trainers: dict[str, TrainerEntry] = Field(default_factory=dict[str, TrainerEntry])
    finetuning: FinetuningConfig = FinetuningConfig()

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
