"""The components behind each `_type` in the YAML, registered by decorator and found by entry point.

A component is a configuration class and a factory that builds the instance from it: a class that takes
``(config, parts)``, or an async generator function ``(config, parts)`` that sets up, yields the instance
once and cleans up afterwards. A package announces its components by an entry point of the group
``insitu.components`` that names the module whose import registers them; so does insitu itself.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Protocol, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from insitu.errors import Conflict, InsituError, InvalidRequest, foreign_code

ENTRY_POINT_GROUP = "insitu.components"

Maker = TypeVar("Maker", bound=Callable[..., object])


class Kind(StrEnum):
    """The kinds of component. `functions` of the YAML are workflows too."""

    WORKFLOW = "workflow"
    EVALUATOR = "evaluator"
    DATASET = "dataset"
    TRAJECTORY_BUILDER = "trajectory_builder"
    TRAINER_ADAPTER = "trainer_adapter"
    TRAINER = "trainer"
    SINK = "sink"


def _is_union(annotation: object) -> bool:
    return get_origin(annotation) in (Union, UnionType)


class Section(BaseModel):
    """Base of every section of the YAML: rejects unknown keys, NaN, infinities, and booleans for numbers."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # the input can be a secret
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """Reject booleans for numbers: `num_epochs: true` would pass as 1."""
        field = cls.model_fields.get(info.field_name or "")
        if isinstance(value, bool) and field is not None:
            kinds = get_args(field.annotation) if _is_union(field.annotation) else (field.annotation,)
            if (int in kinds or float in kinds) and bool not in kinds:
                raise PydanticCustomError("bool_for_number", "Input should be a number")
        return value


class ComponentConfig(Section):
    """Base of every component's configuration."""

    type_name: str = Field(alias="_type")
    """Selects the component."""


def _number_as_text(value: object) -> object:
    """Convert a number to text, because YAML reads `PORT: 8080` as a number."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


EnvironmentValue = Annotated[
    SecretStr, BeforeValidator(_number_as_text, json_schema_input_type=str | int | float)
]
"""The value of an environment variable, never shown."""


class Parts(Protocol):
    """The services available to a component while it is built."""

    @property
    def directory(self) -> Path:
        """The configuration file's directory. Relative paths in the file start at the working directory."""
        ...

    def llm(self, name: str) -> Any:
        """Return the `insitu.workflow.llm.LLMSettings` of `llms.<name>`, not bound to a rollout."""
        ...

    async def evaluator(self, name: str) -> Any:
        """Return the evaluator `eval.evaluators.<name>`, built once."""
        ...


@dataclass(frozen=True, slots=True)
class Component:
    """One registered `_type`."""

    kind: Kind
    type_name: str
    config: type[ComponentConfig]
    make: Callable[..., object]
    origin: str
    """The module that registered it."""


_components: dict[tuple[Kind, str], Component] = {}
_loaded: set[str] = set()


def register(
    kind: Kind, type_name: str, config: type[ComponentConfig] = ComponentConfig
) -> Callable[[Maker], Maker]:
    """Decorate a class or an async generator function that builds the component from ``(config, parts)``."""

    def decorate(make: Maker) -> Maker:
        add(Component(kind, type_name, config, make, getattr(make, "__module__", "?")))
        return make

    return decorate


def add(component: Component) -> None:
    """Register a component; the same name from another module is a Conflict, never a silent override."""
    key = (component.kind, component.type_name)
    known = _components.get(key)
    if known is not None and known.origin != component.origin:
        raise Conflict(
            f"{component.kind} `{component.type_name}` is registered by {known.origin} and by "
            f"{component.origin}",
            hint="give one of them another _type",
        )
    _components[key] = component


def find(kind: Kind, type_name: str) -> Component:
    """Return the component of a `_type`; the error for an unknown one suggests the closest match."""
    load_entry_points()
    component = _components.get((kind, type_name))
    if component is None:
        raise InvalidRequest(
            f"no {kind} has the _type `{type_name}`{nearest(type_name, names(kind))}",
            hint=f"known: {', '.join(names(kind)) or 'none'}; packages add others by an entry point in the "
            f"group `{ENTRY_POINT_GROUP}`",
        )
    return component


def names(kind: Kind) -> list[str]:
    """Return every `_type` of a kind, sorted."""
    load_entry_points()
    return sorted(name for known, name in _components if known is kind)


def load_entry_points() -> None:
    """Import every module that an entry point names, each once."""
    for point in _points():
        if point.value not in _loaded:
            _loaded.add(point.value)  # before the import: the module itself may ask for a component
            try:
                _load(point)
            except InsituError:
                _loaded.discard(point.value)
                raise


@functools.cache
def _points() -> tuple[EntryPoint, ...]:
    """Return the entry points, cached: the lookup reads the metadata of every installed package."""
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def _load(point: EntryPoint) -> None:
    def broken(error: BaseException) -> InvalidRequest:
        owner = point.dist.name if point.dist else "?"
        return InvalidRequest(
            f"the components of package {owner} cannot be imported: {point.value}: "
            f"{type(error).__name__}: {error}",
            hint="repair or uninstall that package",
        )

    with foreign_code(broken):
        point.load()


@asynccontextmanager
async def build(component: Component, config: ComponentConfig, parts: Parts) -> AsyncGenerator[Any]:
    """Yield the instance for as long as the context is open, then await its own `aclose` if it has one."""
    if inspect.isasyncgenfunction(component.make):
        async with asynccontextmanager(component.make)(config, parts) as instance:
            yield instance
        return
    instance = component.make(config, parts)
    try:
        yield instance
    finally:
        close: Callable[[], Awaitable[object]] | None = getattr(instance, "aclose", None)
        if close is not None:
            await close()


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean `x`?`` for an error message, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean `{close[0]}`?" if close else ""
