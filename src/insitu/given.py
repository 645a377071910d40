"""Given: a name in the configuration that carries the object it stands for.

A Python call may pass a function where a file names one. Its name goes into files and messages, as that of
any other; the object itself is what runs.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Self, cast

from pydantic import PlainSerializer, ValidatorFunctionWrapHandler, WrapValidator

ROWS = "<rows>"
"""The name of rows that were passed as a list."""


class Given(str):
    """The name of a function that no import path leads to, or of rows, with the object."""

    __slots__ = ("function",)
    function: Callable[..., object]

    @classmethod
    def named(cls, name: str, function: Callable[..., object]) -> Self:
        """Attach the object to its name."""
        given = cls(name)
        given.function = function
        return given

    def __deepcopy__(self, memo: object) -> Self:
        """Return the same object: an agent may hold clients and locks."""
        return self

    def source(self) -> str | None:
        """Return the source of the function, of an instance that of its class; None if it has none."""
        try:
            return inspect.getsource(_definition(self.function))
        except (OSError, TypeError):  # typed into an interpreter, compiled from text, or written in C
            return None


def given_function(function: Callable[..., object]) -> str:
    """Return `module:function` if that leads to this very function, else its name with the object.

    A script's own functions are in `__main__`, which is another module in the next process.
    """
    definition = _definition(function)
    module = getattr(definition, "__module__", None) or "?"
    qualified = getattr(definition, "__qualname__", None) or type(definition).__qualname__
    name = f"{module}:{qualified}"
    if module != "__main__" and _found(module, qualified) is function:
        return name
    return Given.named(name, function)


def given_rows(rows: Sequence[object]) -> Given:
    """Return the name of rows, with a function that returns them."""
    return Given.named(ROWS, lambda: list(rows))


def _definition(function: Callable[..., object]) -> Callable[..., object]:
    """Return what the source of a callable defines: the function within, or the class of an instance."""
    while isinstance(function, functools.partial):
        function = function.func
    plain = inspect.unwrap(function)
    return plain if inspect.isroutine(plain) or inspect.isclass(plain) else cast("type[object]", type(plain))


def _found(module: str, qualified: str) -> object:
    found: object = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    return found


def _keep(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    return value if isinstance(value, Given) else validate(value)


KEPT = WrapValidator(_keep)
"""Take a `Given` as it is, whatever the annotations before this one check."""
IN_JSON = PlainSerializer(str, return_type=str, when_used="json")
"""Write the name alone."""
Name = Annotated[str, KEPT, IN_JSON]
"""A setting that names a function or a file, or is a `Given`."""
