"""`_type: python`: a function of the user's own code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field

from insitu.errors import InvalidRequest
from insitu.plugins import ComponentConfig, Kind, Parts, nearest, register
from insitu.workflow.classify import describe
from insitu.workflow.function import FunctionWorkflow


class PythonConfig(ComponentConfig):
    """A function by its name."""

    entry: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
    """`package.module:function`."""
    llm: str | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments."""


@register(Kind.WORKFLOW, "python", PythonConfig)
def make_python(config: PythonConfig, parts: Parts) -> FunctionWorkflow:  # noqa: ARG001 - every maker takes parts
    """The workflow that calls `entry`."""
    return FunctionWorkflow(f"`{config.entry}`", load_entry(config.entry), config.args)


def load_entry(entry: str) -> Callable[..., Any]:
    """The object that `package.module:name` names; the current directory can be imported from."""
    module_name, _, name = entry.partition(":")
    found: Any = _import(entry, module_name)
    for part in name.split("."):
        if not hasattr(found, part):
            raise InvalidRequest(
                f"entry `{entry}`: `{getattr(found, '__name__', found)}` has no `{part}`"
                f"{nearest(part, dir(found))}",
                hint=f"it was imported from {getattr(found, '__file__', None) or 'no file'}",
            )
        found = getattr(found, part)
    return found


def _import(entry: str, module_name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise InvalidRequest(
                f"entry `{entry}`: there is no module `{error.name}`",
                hint=f"run from the directory that holds it (now {here}), or install its package",
            ) from error
        raise _broken(entry, module_name, error) from error
    except (Exception, SystemExit) as error:
        raise _broken(entry, module_name, error) from error


def _broken(entry: str, module_name: str, error: BaseException) -> InvalidRequest:
    return InvalidRequest(
        f"entry `{entry}`: importing `{module_name}` failed: {describe(error)}",
        hint=f"try `python -c 'import {module_name}'` in {Path.cwd()}",
    )
