"""The decorator that makes a function a `_type` of evaluator."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

from insitu.errors import InvalidRequest
from insitu.plugins import Component, ComponentConfig, Kind, Parts, add
from insitu.rewards.function_evaluator import FunctionEvaluator, refuse_generators

Function = TypeVar("Function", bound=Callable[..., object])


def register_evaluator(
    type_name: str, config: type[ComponentConfig] | None = None
) -> Callable[[Function], Function]:
    """Register ``(item)`` or ``(item, config)``, async or not, as the evaluator with this `_type`.

    It returns a number or an `EvalResult`. `config` is the class of its fields in the YAML; None means that
    it has none.
    """

    def decorate(function: Function) -> Function:
        refuse_generators(function, type_name)
        takes_config = _takes_config(function, type_name)
        if config is not None and not takes_config:
            raise InvalidRequest(
                f"evaluator `{type_name}` has a config class, but its function takes no config",
                hint="write def function(item, config)",
            )

        def make(settings: ComponentConfig, parts: Parts) -> FunctionEvaluator:  # noqa: ARG001 - every component's shape
            return FunctionEvaluator(function, type_name, *([settings] if takes_config else []))

        add(Component(Kind.EVALUATOR, type_name, config or ComponentConfig, make, function.__module__))
        return function

    return decorate


def _takes_config(function: Callable[..., object], type_name: str) -> bool:
    signature = inspect.signature(function)
    for arguments in ((None,), (None, None)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        many = sum(
            p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in signature.parameters.values()
        )
        return len(arguments) == 2 or many >= 2
    raise InvalidRequest(
        f"evaluator `{type_name}` takes {signature}", hint="let it take (item) or (item, config)"
    )
