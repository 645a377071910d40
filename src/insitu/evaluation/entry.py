"""Entry points in the YAML: ``package.module:function`` or ``package.module.function``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from insitu.errors import InvalidRequest
from insitu.plugins import nearest


def load_entry(entry: str, *directories: Path) -> Callable[..., Any]:
    """The named function. Modules are also looked for in the given directories, after all others."""
    module_name, _, attribute = entry.partition(":") if ":" in entry else entry.rpartition(".")
    if not module_name or not attribute:
        raise InvalidRequest(
            f"`{entry}` does not name a function",
            hint="write package.module:function, for example rewards:score",
        )
    found: Any = _import(entry, module_name, directories)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InvalidRequest(
                f"`{entry}`: {module_name} has no `{part}`{nearest(part, vars(found))}",
                hint=f"it was read from {getattr(sys.modules[module_name], '__file__', '?')}",
            )
        found = getattr(found, part)
    if not callable(found):
        raise InvalidRequest(f"`{entry}` is a {type(found).__name__}, not a function")
    return found


def _import(entry: str, module_name: str, directories: tuple[Path, ...]) -> Any:
    known = {str(Path(place).resolve()) for place in sys.path}
    for place in dict.fromkeys(str(directory.resolve()) for directory in directories):
        if place not in known:
            # Last, so that a file beside the YAML never takes the place of an installed package.
            sys.path.append(place)
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise InvalidRequest(
            f"`{entry}`: {module_name} cannot be imported: {type(error).__name__}: {error}",
            hint="install the package, or start where the module lies",
        ) from error
