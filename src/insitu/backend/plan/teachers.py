"""Teachers of `insitu serve --teacher NAME=URL`: servers whose models score tokens for distillation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from insitu.errors import CannotHonour
from insitu.types import NAME_PATTERN

_KEY_PREFIX = "INSITU_TEACHER_KEY_"


@dataclass(frozen=True, slots=True)
class TeacherSettings:
    """One teacher. Only the operator names URLs; a client names a teacher."""

    name: str
    url: str
    """Without a trailing `/v1`."""
    model: str | None
    """The model's name at that server; None if it serves one only."""
    key: str | None = field(repr=False)


def key_variable(name: str) -> str:
    """Return the environment variable with a teacher's key."""
    return _KEY_PREFIX + re.sub(r"[^A-Z0-9]", "_", name.upper())


def read_teachers(given: Iterable[str], environment: Mapping[str, str]) -> tuple[TeacherSettings, ...]:
    """Read `NAME=URL` or `NAME=URL#MODEL`, each with the key in its environment variable."""
    teachers: dict[str, TeacherSettings] = {}
    for option in given:
        teacher = _read(option, environment)
        if teachers.setdefault(teacher.name, teacher) != teacher:
            raise CannotHonour(f"--teacher {teacher.name} is given twice", hint="give each a name of its own")
    return tuple(teachers.values())


def unknown_teacher(name: str, known: Iterable[str]) -> CannotHonour:
    """Return the error for a teacher that is neither a step of a run nor one of `--teacher`."""
    names = ", ".join(sorted(known)) or "none"
    return CannotHonour(
        f"no teacher {name!r} here; `insitu serve --teacher` named {names}",
        hint="name one of these, or a kept step of a run as <run>@<step>",
    )


def _read(option: str, environment: Mapping[str, str]) -> TeacherSettings:
    name, _, address = option.partition("=")
    if not NAME_PATTERN.fullmatch(name):
        raise CannotHonour(
            f"--teacher {option}: {name!r} is not a name",
            hint="write NAME=URL; a name has lowercase letters, digits, dots, dashes and underscores",
        )
    whole = urlsplit(address)
    if whole.scheme not in ("http", "https") or not whole.hostname or whole.query:
        raise CannotHonour(
            f"--teacher {name}: its address is not a URL of a server",
            hint=f"for example --teacher {name}=http://10.0.0.5:8000/v1",
        )
    if whole.username is not None or whole.password is not None:
        raise CannotHonour(
            f"--teacher {name}: the URL holds a password", hint=f"put the key in {key_variable(name)}"
        )
    path = whole.path.rstrip("/").removesuffix("/v1")
    url = f"{whole.scheme}://{whole.netloc}{path}"
    return TeacherSettings(name, url, whole.fragment or None, environment.get(key_variable(name)) or None)
