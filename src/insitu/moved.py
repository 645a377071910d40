"""Former names of public modules: they still import, with a DeprecationWarning that names the new one."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_INTERFACES = "settings trained_model trainer trainer_adapter training_job trajectory_builder"
MOVED = {
    "insitu.answers": "insitu.wire.answers",
    "insitu.evaluation": "insitu.rewards",
    "insitu.evaluation.dataset": "insitu.datasets.dataset",
    "insitu.evaluation.evaluator": "insitu.rewards.evaluator",
    "insitu.evaluation.items": "insitu.rewards.items",
    "insitu.evaluation.trajectory": "insitu.rewards.trajectory",
    "insitu.harness.capture": "insitu.harness.rollouts.capture",
    "insitu.harness.group_builder": "insitu.harness.collect.group_builder",
    "insitu.recorded": "insitu.wire.listed_calls",
    "insitu.transport": "insitu.wire.transport",
} | {f"insitu.harness.{name}": f"insitu.harness.interfaces.{name}" for name in _INTERFACES.split()}


class _Redirect(Loader):
    """Put the module of today under its former name, so that both names give the same classes."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Use the default module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Replace `module` by the one under the new name."""
        name = module.__name__
        warnings.warn(f"{name} is now {MOVED[name]}", DeprecationWarning, stacklevel=2)
        sys.modules[name] = importlib.import_module(MOVED[name])


class FormerNames(MetaPathFinder):
    """Find a module by its former name."""

    def find_spec(self, fullname: str, *_: Sequence[str] | ModuleType | None) -> ModuleSpec | None:
        """Return a redirect for a former name, None for any other."""
        return ModuleSpec(fullname, _Redirect()) if fullname in MOVED else None
