"""Functions of the user's own code, named in the YAML: ``package.module:function``."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from insitu.errors import InvalidRequest, describe, foreign_code
from insitu.given import Given
from insitu.plugins import nearest
from insitu.user_traceback import with_frames


def load_entry(entry: str, *directories: Path) -> Callable[..., object]:
    """Import the named function; ``package.module.function`` is accepted too.

    Modules are searched for first in the current directory, as `python` itself does, and last in
    `directories`. A name that carries its function needs no import.
    """
    if isinstance(entry, Given):
        return entry.function
    module_name, attribute = _parts(entry)
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
        raise InvalidRequest(
            f"entry `{entry}` is a {type(found).__name__}, not a function", hint=_wrap(type(found))
        )
    return found


def entry_files(entry: str) -> dict[str, Path]:
    """Return the files of an entry's module and of the one that defines its function, by module name.

    The entry has been loaded before.
    """
    module_name, attribute = _parts(entry)
    found: object = sys.modules.get(module_name)
    for part in attribute.split("."):
        found = getattr(found, part, None)
    defined_in = getattr(inspect.unwrap(found) if callable(found) else found, "__module__", None)
    return {name: path for name in (module_name, defined_in) if name and (path := module_file(name))}


def module_file(name: str) -> Path | None:
    """Return the file of an imported module; None if it has none, or is a part of insitu."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or name.partition(".")[0] == "insitu" or not Path(file).is_file():
        return None
    return Path(file)


def _wrap(kind: type) -> str:
    """Say how an object becomes an entry; a graph of LangGraph needs the model of each rollout."""
    modules = {parent.__module__.partition(".")[0] for parent in kind.__mro__}
    if "langgraph" not in modules and not hasattr(kind, "ainvoke"):
        return "name a function that calls it; for the agents of frameworks see docs/frameworks.md"
    compiled = "" if hasattr(kind, "ainvoke") else ".compile()"
    return (
        "wrap it in a function that builds it with the rollout's model, and name that function:\n"
        "    async def run(question, context):\n"
        f'        graph = build_graph(context.client("langchain")){compiled}\n'
        '        state = await graph.ainvoke({"messages": [("user", question)]})\n'
        '        return state["messages"][-1].content'
    )


def _parts(entry: str) -> tuple[str, str]:
    module_name, _, attribute = entry.partition(":") if ":" in entry else entry.rpartition(".")
    return module_name, attribute


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
