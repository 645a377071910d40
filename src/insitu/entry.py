"""Functions of the user's own code, named in the YAML: ``package.module:function``."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from insitu.errors import InvalidRequest, describe, foreign_code
from insitu.plugins import nearest
from insitu.user_traceback import with_frames


def load_entry(entry: str, *directories: Path) -> Callable[..., object]:
    """Import the named function; ``package.module.function`` is accepted too.

    Modules are searched for first in the current directory, as `python` itself does, and last in
    `directories`.
    """
    module_name, _, attribute = entry.partition(":") if ":" in entry else entry.rpartition(".")
    if not module_name or not attribute:
        raise InvalidRequest(
            f"entry `{entry}` does not name a function",
            hint="write package.module:function, for example rewards:score",
        )
    _add_paths(directories)
    found: object = _import(entry, module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InvalidRequest(
                f"entry `{entry}`: `{getattr(found, '__name__', found)}` has no `{part}`"
                f"{nearest(part, dir(found))}",
                hint=f"it was imported from {getattr(sys.modules[module_name], '__file__', None)}",
            )
        found = getattr(found, part)
    if not callable(found):
        raise InvalidRequest(f"entry `{entry}` is a {type(found).__name__}, not a function")
    return found


def _add_paths(directories: tuple[Path, ...]) -> None:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    for place in dict.fromkeys(str(directory.resolve()) for directory in directories):
        if place not in sys.path:
            # Last, so that a file beside the YAML never shadows an installed package.
            sys.path.append(place)


def _import(entry: str, module_name: str) -> ModuleType:
    with foreign_code(functools.partial(_broken, entry, module_name)):
        return importlib.import_module(module_name)


def _broken(entry: str, module_name: str, error: BaseException) -> InvalidRequest:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and (module_name == missing or module_name.startswith(f"{missing}.")):
        return InvalidRequest(
            f"entry `{entry}`: there is no module `{missing}`",
            hint=f"run from the directory that holds it (now {Path.cwd()}), or install its package",
        )
    return InvalidRequest(
        with_frames(f"entry `{entry}`: importing `{module_name}` failed: {describe(error)}", error),
        hint=f"try `python -c 'import {module_name}'` in {Path.cwd()}",
    )
