"""Rewards that are plain functions: ``(item) -> number or EvalResult``, async or not.

An `EvalResult` may carry rewards of single calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from pydantic import Field

from insitu.entry import load_entry
from insitu.errors import InvalidRequest
from insitu.given import Name
from insitu.plugins import ComponentConfig, Kind, Parts, register
from insitu.rewards.evaluator import Evaluator
from insitu.rewards.items import EvalItem, EvalResult
from insitu.rewards.score import to_result
from insitu.system.threads import DaemonThreads


class FunctionEvaluator(Evaluator):
    """Calls a function for every item; a synchronous one runs in its own thread."""

    def __init__(self, function: Callable[..., object], name: str, *args: object, **kwargs: object) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an instance may have an async __call__
        )
        self._threads = DaemonThreads(f"insitu-evaluator-{name}")

    async def evaluate_item(self, item: EvalItem) -> EvalResult:
        """Call the function and check its result."""
        value = self._call(item) if self._is_async else await self._threads.run(self._call, item)
        return to_result(item, await value if inspect.isawaitable(value) else value)

    def _call(self, item: EvalItem) -> object:
        return self._function(item, *self._args, **self._kwargs)


class PythonEvaluatorConfig(ComponentConfig):
    """A function, given by name."""

    entry: Name
    """``package.module:function``."""
    args: dict[str, object] = Field(default_factory=dict)
    """The function's arguments after the item, by name."""


@register(Kind.EVALUATOR, "python", PythonEvaluatorConfig)
def python_evaluator(config: PythonEvaluatorConfig, parts: Parts) -> FunctionEvaluator:
    """Build an evaluator that calls ``function(item, **args)``."""
    function = load_entry(config.entry, parts.directory)
    refuse_generators(function, config.entry)
    try:
        inspect.signature(function).bind(None, **config.args)
    except TypeError as error:
        raise InvalidRequest(
            f"`{config.entry}` cannot be called with an item and args {sorted(config.args)}: {error}",
            hint="it takes one item, with item.input, item.expected and item.output; args holds the "
            "function's arguments after the first, by name",
        ) from error
    except ValueError:
        # Written in C, without a signature: the first call shows a mismatch.
        pass
    return FunctionEvaluator(function, config.entry, **config.args)


def refuse_generators(function: Callable[..., object], name: str) -> None:
    """Reject generator functions: they return no score."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidRequest(
            f"evaluator `{name}` is a generator", hint="return the score instead of yielding it"
        )
