"""An entry in a map of components; its `_type` selects the class that parses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, cast

from pydantic import BeforeValidator, SerializeAsAny, WithJsonSchema
from pydantic_core import PydanticCustomError

from insitu import plugins
from insitu.config.values.problems import Problem, validation_error
from insitu.errors import InsituError
from insitu.plugins import ComponentConfig, Kind


def _reader(kind: Kind) -> Callable[[object], ComponentConfig]:
    def read(value: object) -> ComponentConfig:
        if isinstance(value, ComponentConfig):
            return value
        if not isinstance(value, Mapping):
            raise PydanticCustomError("component", "Input should be a mapping with a `_type`")
        return _read_mapping(kind, cast("Mapping[str, object]", value))

    return read


def _of_name(value: object) -> object:
    """Read a lone name as the `_type` of an entry without settings."""
    return {"_type": value} if isinstance(value, str) else value


def _read_mapping(kind: Kind, value: Mapping[str, object]) -> ComponentConfig:
    type_name = value.get("_type")
    if not isinstance(type_name, str):
        known = ", ".join(plugins.names(kind)) or "none"
        what = "is missing" if type_name is None else "should be a string"
        raise validation_error([Problem(("_type",), f"{what}; known: {known}")])
    try:
        return plugins.find(kind, type_name).config.model_validate(value)
    except InsituError as error:
        text = f"{error.message} ({error.hint})" if error.hint else error.message
        raise validation_error([Problem(("_type",), text)]) from error


KIND = "x-insitu-kind"
"""Marks an entry in the JSON schema; `insitu.config.schema` puts the components of the kind there."""


def _marked(kind: Kind) -> WithJsonSchema:
    return WithJsonSchema({KIND: kind.value})


# The annotation carries the kind so that `shape` can resolve models along a path.
WorkflowEntry = Annotated[
    SerializeAsAny[ComponentConfig],
    Kind.WORKFLOW,
    BeforeValidator(_reader(Kind.WORKFLOW)),
    _marked(Kind.WORKFLOW),
]
EvaluatorEntry = Annotated[
    SerializeAsAny[ComponentConfig],
    Kind.EVALUATOR,
    BeforeValidator(_reader(Kind.EVALUATOR)),
    _marked(Kind.EVALUATOR),
]
DatasetEntry = Annotated[
    SerializeAsAny[ComponentConfig],
    Kind.DATASET,
    BeforeValidator(_reader(Kind.DATASET)),
    _marked(Kind.DATASET),
]
TrajectoryBuilderEntry = Annotated[
    SerializeAsAny[ComponentConfig],
    Kind.TRAJECTORY_BUILDER,
    BeforeValidator(_reader(Kind.TRAJECTORY_BUILDER)),
    _marked(Kind.TRAJECTORY_BUILDER),
]
TrainerAdapterEntry = Annotated[
    SerializeAsAny[ComponentConfig],
    Kind.TRAINER_ADAPTER,
    BeforeValidator(_reader(Kind.TRAINER_ADAPTER)),
    _marked(Kind.TRAINER_ADAPTER),
]
TrainerEntry = Annotated[
    SerializeAsAny[ComponentConfig],
    Kind.TRAINER,
    BeforeValidator(_reader(Kind.TRAINER)),
    _marked(Kind.TRAINER),
]
SinkEntry = Annotated[
    SerializeAsAny[ComponentConfig],
    Kind.SINK,
    BeforeValidator(_reader(Kind.SINK)),
    BeforeValidator(_of_name),
    _marked(Kind.SINK),
]
