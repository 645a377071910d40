"""`insitu.function("planner")`: names the part of an agent that makes the enclosed model calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import ParamSpec, TypeVar, cast

from insitu.errors import InvalidRequest
from insitu.types import FUNCTION_PATTERN
from insitu.workflow.context import entered, rollout_or_none

Decorated = TypeVar("Decorated", bound=Callable[..., object])
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class function:  # noqa: N801 - used like a function
    """A context manager, or a decorator for `def` and `async def`, that sets `current_rollout().function`.

    Outside of any rollout it does nothing, so that an agent can keep it in production.
    """

    def __init__(self, name: str) -> None:
        if not FUNCTION_PATTERN.fullmatch(name):
            raise InvalidRequest(
                f"{name!r} cannot be the name of a function",
                hint=f"it matches {FUNCTION_PATTERN.pattern}",
            )
        self._name = name
        self._inside: list[AbstractContextManager[None] | None] = []

    def __enter__(self) -> None:
        if self._inside:
            raise InvalidRequest(
                f"insitu.function({self._name!r}) is entered twice",
                hint="write `with insitu.function(...)` again for each block",
            )
        context = rollout_or_none()
        block = entered(context.marked(self._name)) if context is not None else None
        self._inside.append(block)
        if block is not None:
            block.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block = self._inside.pop()
        if block is not None:
            block.__exit__(kind, error, trace)

    def __call__(self, decorated: Decorated) -> Decorated:
        """Wrap the function so that its model calls carry the name."""
        if inspect.isgeneratorfunction(decorated) or inspect.isasyncgenfunction(decorated):
            raise InvalidRequest(
                f"{decorated.__qualname__} is a generator, which insitu.function cannot follow",
                hint="use `with insitu.function(...)` inside it, around model calls and not around `yield`",
            )
        if inspect.iscoroutinefunction(decorated):
            return cast(Decorated, _named_async(self._name, decorated))
        return cast(Decorated, _named(self._name, decorated))


def _named(name: str, decorated: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    @functools.wraps(decorated)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with function(name):
            return decorated(*args, **kwargs)

    return call


def _named_async(
    name: str, decorated: Callable[Arguments, Awaitable[Result]]
) -> Callable[Arguments, Awaitable[Result]]:
    @functools.wraps(decorated)
    async def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with function(name):
            return await decorated(*args, **kwargs)

    return call
