"""`@register_workflow("my_workflow")`: a plain function under a `_type` of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from insitu.plugins import Component, ComponentConfig, Kind, Parts, add
from insitu.workflow.kinds.function import FunctionWorkflow, check_function, takes_context

Function = TypeVar("Function", bound=Callable[..., object])


class RegisteredConfig(ComponentConfig):
    """The default configuration class of a registered function."""

    llm: str | None = None
    description: str = ""


def register_workflow(
    type_name: str, *, config: type[ComponentConfig] = RegisteredConfig
) -> Callable[[Function], Function]:
    """Register ``f(input)`` or ``f(input, context)`` as a `_type`; its settings are in ``context.config``.

    A package exposes it through an entry point in the group `insitu.components` that names its module.
    """

    def decorate(function: Function) -> Function:
        name = f"`{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', function)}`"
        check_function(name, function)
        takes_context(name, function, {})

        def make(config: ComponentConfig, parts: Parts) -> FunctionWorkflow:  # noqa: ARG001 - as every maker
            return FunctionWorkflow(name, function)

        add(Component(Kind.WORKFLOW, type_name, config, make, getattr(function, "__module__", "?")))
        return function

    return decorate
