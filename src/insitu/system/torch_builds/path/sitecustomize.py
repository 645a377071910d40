"""Hide the packages that `insitu.system.torch_builds` named, then do what the environment does at its start.

Python imports this file when its folder is on PYTHONPATH, in engines and their own children alike.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

for _name in os.environ.get("INSITU_HIDDEN_PACKAGES", "").split(","):
    if _name:
        sys.modules[_name] = None  # type: ignore[assignment]

_elsewhere = [_part for _part in sys.path if Path(_part) != Path(__file__).parent]
_spec = PathFinder.find_spec("sitecustomize", _elsewhere)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(module_from_spec(_spec))
