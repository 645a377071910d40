"""One error that lists every problem, each as `path.to.key: what is wrong`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from insitu.errors import InvalidRequest

Location: TypeAlias = tuple[str | int, ...]
"""A place in a file: the keys and indices that lead to it."""

UNKNOWN_KEY = "extra_forbidden"
"""The kind of a key that no model knows; the name is pydantic's."""
NOT_HONOURED = "not_honoured"
"""The kind of a setting that is understood, asks for something, and has no effect here."""
UNSET_VARIABLE = "unset_variable"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem and its location."""

    location: Location
    text: str
    kind: str = "invalid"
    """Pydantic's error type, or one of the constants above."""

    def __str__(self) -> str:
        return f"{dotted(self.location)}: {self.text}"


def dotted(location: Location) -> str:
    """Format a location as on the command line: `finetuning.target_functions.0`."""
    return ".".join(str(part) for part in location) or "the file"


def refusal(where: str, problems: Iterable[Problem], hint: str = "") -> InvalidRequest:
    """Build the error to raise; `where` is the file or the command-line option."""
    lines = list(dict.fromkeys(str(problem) for problem in problems))
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return InvalidRequest(f"{where}: {count}\n" + "\n".join(f"  {line}" for line in lines), hint=hint)


def validation_error(problems: Iterable[Problem]) -> ValidationError:
    """Wrap problems in a pydantic error, each with its location."""
    return ValidationError.from_exception_data(
        "configuration",
        [
            InitErrorDetails(
                type=PydanticCustomError("insitu", "{text}", {"text": problem.text}),
                loc=problem.location,
                input=None,
            )
            for problem in problems
        ],
        hide_input=True,
    )
