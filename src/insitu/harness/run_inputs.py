"""The inputs of a run: the files of its agent and its reward, and its datasets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from insitu.entry import entry_files, module_file
from insitu.given import Given
from insitu.harness.assembly import Assembly
from insitu.harness.interfaces.run import Task
from insitu.harness.interfaces.run_input import Role, RunInput, dataset_input, file_input, source_input
from insitu.plugins import ComponentConfig, Kind, find

_ROLES = {Kind.WORKFLOW: Role.AGENT, Kind.EVALUATOR: Role.REWARD}


def run_inputs(parts: Assembly, training: Task, validation: Task | None) -> list[RunInput]:
    """Describe everything that the run's tasks were built from."""
    found = _code(parts, _ROLES)
    if (other := parts.validation_parts) is not None:
        found |= _code(other, dict.fromkeys(_ROLES, Role.VALIDATION_CODE))
    datasets = [dataset_input(Role.TRAINING, training.examples)]
    if validation is not None:
        datasets.append(dataset_input(Role.VALIDATION, validation.examples))
    return [*found.values(), *datasets]


def _code(parts: Assembly, roles: Mapping[Kind, Role]) -> dict[tuple[Role, str], RunInput]:
    """Describe the files and given functions of the components that have a role, each once."""
    files = {
        (role, name): file_input(role, name, path)
        for kind, config in parts.built
        if (role := roles.get(kind))
        for name, path in _files(kind, config, parts.directory)
    }
    return files | {
        (role, str(given)): source_input(role, str(given), source)
        for role, given in _given(parts, roles)
        if (source := given.source()) is not None
    }


def unseen_changes(parts: Assembly) -> list[str]:
    """Name the given functions whose source cannot be read, in a sentence each."""
    return [
        f"{role}: the source of `{given}` cannot be read, so a later change of it goes unnoticed"
        for role, given in _given(parts, _ROLES)
        if given.source() is None
    ]


def _given(parts: Assembly, roles: Mapping[Kind, Role]) -> list[tuple[Role, Given]]:
    """List the functions that a Python call has given as objects."""
    found = [(roles.get(kind), getattr(config, "entry", None)) for kind, config in parts.built]
    return [(role, entry) for role, entry in found if role and isinstance(entry, Given)]


def _files(kind: Kind, config: ComponentConfig, directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a component that is the user's own code, each with its name."""
    entry, command = getattr(config, "entry", None), getattr(config, "command", None)
    if isinstance(entry, Given):
        return
    if isinstance(entry, str):
        yield from entry_files(entry).items()
    elif isinstance(command, list):
        # Programs that score start beside the configuration file, agents in `cwd`.
        base = directory if kind is Kind.EVALUATOR else Path.cwd() / (getattr(config, "cwd", None) or "")
        yield from _script(cast("Sequence[str]", command), base)
    else:
        origin = find(kind, config.type_name).origin
        if file := module_file(origin):
            yield origin, file


def _script(command: Sequence[str], base: Path) -> Iterator[tuple[str, Path]]:
    """Yield the first word of a command that is a file in its directory."""
    for word in command:
        file = base / word
        if file.is_file() and file.resolve().is_relative_to(base.resolve()):
            yield word, file
            return
