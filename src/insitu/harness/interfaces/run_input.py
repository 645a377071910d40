"""RunInput: a file or a dataset that a run learns from, as it was when the run used it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import cast

import orjson

from insitu.datasets.example import Example

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_OPTIONS = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS


class Role(StrEnum):
    """The use of an input."""

    AGENT = "agent"
    REWARD = "reward"
    TRAINING = "training data"
    VALIDATION = "validation data"
    VALIDATION_CODE = "validation"
    """Agent and reward of `--validation_config_file`."""


SHAPE_ROLLOUTS = frozenset({Role.AGENT, Role.REWARD, Role.TRAINING})
"""Rollouts for training are other ones after a change of these."""
SHAPE_VALIDATIONS = frozenset({Role.AGENT, Role.REWARD, Role.VALIDATION, Role.VALIDATION_CODE})
"""Validations before and after a change of these cannot be compared."""


@dataclass(frozen=True, slots=True)
class RunInput:
    """One file or one dataset."""

    role: Role
    name: str
    """The module, the script as the configuration names it, or a given function; "" for a dataset."""
    path: str
    """The file, or the name of a given function, as people see it; "" for a dataset."""
    sha256: str
    count: int
    """Lines of a file or function, rows of a dataset."""

    def difference(self, before: RunInput) -> str:
        """Say in one line how it differs."""
        what, unit = (f"{self.role}, {self.path}", "lines") if self.path else (str(self.role), "rows")
        if self.count == before.count:
            return f"{what}: other content, {self.count} {unit} as before"
        return f"{what}: {self.count} {unit}, {before.count} before"


def file_input(role: Role, name: str, file: Path) -> RunInput:
    """Describe a file as it is now."""
    data, here = file.read_bytes(), Path.cwd()
    shown = file.relative_to(here) if file.is_relative_to(here) else file
    return RunInput(role, name, str(shown), hashlib.sha256(data).hexdigest(), len(data.splitlines()))


def source_input(role: Role, name: str, source: str) -> RunInput:
    """Describe a function by its own source."""
    return RunInput(role, name, name, hashlib.sha256(source.encode()).hexdigest(), len(source.splitlines()))


def dataset_input(role: Role, examples: Sequence[Example]) -> RunInput:
    """Describe the examples of a dataset."""
    content = hashlib.sha256()
    for example in examples:
        row = _bytes([example.id, example.input, example.expected, dict(example.row)])
        content.update(len(row).to_bytes(8) + row)
    return RunInput(role, "", "", content.hexdigest(), len(examples))


def _bytes(value: object) -> bytes:
    try:
        return orjson.dumps(value, default=_plain, option=_OPTIONS)
    except TypeError:  # numbers beyond 64 bits, broken Unicode
        return _plain(value).encode("utf-8", "backslashreplace")


def _plain(value: object) -> str:
    """Return the same text for equal values in every process: no address, no order of a set."""
    if isinstance(value, set | frozenset):
        return repr(sorted(map(_plain, cast("set[object]", value))))
    return _ADDRESS.sub("", repr(value))
