"""A plain function as a workflow: ``f(input)`` or ``f(input, context)``, async or blocking."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping

from insitu.errors import InvalidRequest
from insitu.system.threads import DaemonThreads
from insitu.types import Ending
from insitu.workflow.context import WorkflowContext
from insitu.workflow.outcome import WorkflowFailed
from insitu.workflow.workflow import Workflow

MAX_ABANDONED = 64
"""Maximum number of hung threads per workflow."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class FunctionWorkflow(Workflow):
    """Runs a function: an async one on the event loop, any other in a daemon thread."""

    def __init__(
        self, name: str, function: Callable[..., object], args: Mapping[str, object] | None = None
    ) -> None:
        check_function(name, function)
        self.threads = DaemonThreads("insitu-workflow")
        self._name = name
        self._function = function
        self._args = dict(args or {})
        self._takes_context = takes_context(name, function, self._args)
        self._is_async = _holds(inspect.iscoroutinefunction, function)

    async def run(self, value: object, context: WorkflowContext) -> object:
        """Call the function; cancelling a blocking one leaves its thread behind."""
        given = (value, context) if self._takes_context else (value,)
        args = copy.deepcopy(self._args)  # an agent that changes them must not change other rollouts
        call = functools.partial(self._function, *given, **args)
        if self._is_async:
            result = call()
        else:
            self._refuse_more_threads()
            result = await self.threads.run(call)
        return await result if inspect.isawaitable(result) else result

    def _refuse_more_threads(self) -> None:
        hung = self.threads.alive_abandoned
        if hung > MAX_ABANDONED:
            raise WorkflowFailed(
                f"{hung} threads of {self._name} still run after their time limit; no more are started",
                ending=Ending.INFRASTRUCTURE,
                hint="threads cannot be killed: write it as `async def`, or run it with `_type: command`",
            )


def check_function(name: str, function: object) -> None:
    """Reject anything that cannot be called once for one result."""
    if inspect.isclass(function):
        raise InvalidRequest(
            f"{name} is a class", hint="name a function, or an instance that can be called, of that module"
        )
    if not callable(function):
        raise InvalidRequest(f"{name} is a {type(function).__name__}, not a function", hint="name a function")
    for is_generator in (inspect.isasyncgenfunction, inspect.isgeneratorfunction):
        if _holds(is_generator, function):
            raise InvalidRequest(
                f"{name} is a generator; a workflow gives one result", hint="return it instead of yielding"
            )


def takes_context(name: str, function: Callable[..., object], args: Mapping[str, object]) -> bool:
    """Return True for ``(input, context)``, False for ``(input)``; reject any other signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return False
    required = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind in _POSITIONAL
        and parameter.default is parameter.empty
        and (parameter.name not in args or parameter.kind is parameter.POSITIONAL_ONLY)
    ]
    given = 2 if len(required) == 2 else 1
    try:
        signature.bind(*[None] * given, **args)
    except TypeError as error:
        raise InvalidRequest(
            f"{name}{signature} cannot be called with (input) or (input, context): {error}",
            hint="give it one or two positional parameters, and the others by `args`",
        ) from error
    return given == 2


def _holds(test: Callable[[object], bool], function: object) -> bool:
    """Return True if a test holds for a function or for the `__call__` of an instance."""
    return test(function) or test(getattr(function, "__call__", None))  # noqa: B004 - the method, not callability
