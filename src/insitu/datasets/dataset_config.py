"""The `dataset` section of the YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import AliasChoices, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from insitu.config.values.file_types import TYPE_BY_SUFFIX
from insitu.config.values.problems import NOT_HONOURED
from insitu.errors import InvalidRequest
from insitu.given import Given, Name
from insitu.plugins import ComponentConfig, Kind, Section, find

Pattern = str | bool | int | float
"""A glob over the text of a cell, or a plain value."""


class FilterEntry(Section):
    """Patterns by column."""

    field: dict[str, list[Pattern]] = Field(default_factory=dict)
    """Globs or plain values by column; a cell must match one of them."""

    @model_validator(mode="after")
    def _patterns_exist(self) -> Self:
        empty = [column for column, patterns in self.field.items() if not patterns]
        if empty:
            raise ValueError(f"no patterns for {', '.join(empty)}: leave the column out or give some")
        return self


class FilterConfig(Section):
    """Selects the rows that match every column of the allowlist and none of the denylist."""

    allowlist: FilterEntry | None = None
    """Rows must match every column of it."""
    denylist: FilterEntry | None = None
    """Rows must match no column of it."""


_WITHOUT_EFFECT = {
    "generated_answer_key": "outputs come from rollouts, never from the dataset",
    "trajectory_key": "trajectories come from recorded model calls, never from the dataset",
    "expected_trajectory_key": "evaluators read any column from item.row by its own name",
}


class StructureConfig(Section):
    """Columns of the input and the expected answer."""

    disable: bool = False
    """Take the whole row as the input; there is no separate expected answer."""
    question_key: str = Field(default="question", validation_alias=AliasChoices("question_key", "question"))
    """The column of the input."""
    answer_key: str = Field(default="answer", validation_alias=AliasChoices("answer_key", "answer"))
    """The column of the expected answer."""
    generated_answer_key: str = Field(
        default="generated_answer", validation_alias=AliasChoices("generated_answer_key", "generated_answer")
    )
    """Without effect here; accepted with its default."""
    trajectory_key: str = Field(
        default="intermediate_steps", validation_alias=AliasChoices("trajectory_key", "intermediate_steps")
    )
    """Without effect here; accepted with its default."""
    expected_trajectory_key: str = Field(
        default="expected_intermediate_steps",
        validation_alias=AliasChoices("expected_trajectory_key", "expected_intermediate_steps"),
    )
    """Without effect here; accepted with its default."""

    @field_validator(*_WITHOUT_EFFECT)
    @classmethod
    def _nothing_without_effect(cls, value: str, info: ValidationInfo) -> str:
        name = str(info.field_name)
        if value != cls.model_fields[name].default:
            text = f"{name} has no effect here: {_WITHOUT_EFFECT[name]}; remove it"
            raise PydanticCustomError(NOT_HONOURED, "{text}", {"text": text})
        return value

    @model_validator(mode="after")
    def _the_row_or_its_columns(self) -> Self:
        if self.disable and (self.question_key, self.answer_key) != ("question", "answer"):
            raise ValueError("question_key and answer_key have no effect with disable: true; remove them")
        return self


class DatasetConfig(ComponentConfig):
    """Settings common to all datasets."""

    id_key: str = "id"
    """The column of the row's id."""
    filter: FilterConfig = FilterConfig()
    """Selects rows."""
    structure: StructureConfig = StructureConfig()
    """Names the columns."""


class FileDatasetConfig(DatasetConfig):
    """Rows of a file. Relative paths start at the current directory."""

    file_path: Path
    """The file."""


class CustomDatasetConfig(DatasetConfig):
    """Rows returned by a user's function."""

    function: Name
    """``package.module:function`` or ``package.module.function``."""
    file_path: Path | None = None
    """Passed to the function, if given."""
    kwargs: dict[str, object] = Field(default_factory=dict)
    """Further keyword arguments of the function."""

    @model_validator(mode="after")
    def _one_file_path(self) -> Self:
        if self.file_path is not None and "file_path" in self.kwargs:
            raise ValueError("file_path is given twice: in kwargs and beside it")
        return self


def dataset_config(path: str | Path, base: ComponentConfig | None = None) -> ComponentConfig:
    """Configure the dataset of another file, with the ids, filters and structure of `base`.

    A base that reads its file with a user's function keeps doing so; otherwise the file's extension
    decides the type. Rows or a function that a Python call has given stand in for a file.
    """
    kept = {name: getattr(base, name) for name in ("id_key", "filter", "structure") if hasattr(base, name)}
    if isinstance(path, Given):
        return CustomDatasetConfig.model_validate(kept | {"_type": "custom", "function": path})
    if base is not None and not isinstance(base, FileDatasetConfig) and getattr(base, "file_path", None):
        fields = {name: getattr(base, name) for name in type(base).model_fields}
        return type(base).model_validate(fields | {"file_path": Path(path)})
    suffix = Path(path).suffix.lower()
    if suffix not in TYPE_BY_SUFFIX:
        raise InvalidRequest(
            f"dataset `{path}` has the extension `{suffix}`, which names no type of dataset",
            hint=f"known: {', '.join(TYPE_BY_SUFFIX)}; for other files set eval.general.dataset with a _type",
        )
    type_name = TYPE_BY_SUFFIX[suffix]
    return find(Kind.DATASET, type_name).config.model_validate(
        kept | {"_type": type_name, "file_path": Path(path)}
    )
