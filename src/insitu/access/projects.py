"""Projects: whose run or call a stored name is.

    request ── "adder" ──► stored: "team-a~adder" ──► ledger, records, checkpoints, engines
    answer  ◄─ "adder" ─── shown:  "team-a~adder" ◄──┘

A name is stored as one text, with the project of the key that made it in front. Requests are translated
where they arrive and answers where they leave, so a key cannot name anything of another project. A key
without a project uses the stored names themselves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeVar

from insitu.errors import Forbidden, InsituError
from insitu.types import parse_policy
from insitu.wire.values import SEPARATOR, UPLOADED

UNNAMED = ("default", "trainer_project")
"""Projects of registrations that name none: the defaults of the API and of `insitu finetune`."""
_ANOTHERS = "a run of another project"
_QUALIFIED = re.compile(rf"(?<![A-Za-z0-9._~-])[a-z0-9][a-z0-9._-]*{SEPARATOR}[A-Za-z0-9._:@~-]*")
"""A stored name in a text: of a run, a step, a rollout or a call."""
Failure = TypeVar("Failure", bound=InsituError)


@dataclass(frozen=True, slots=True)
class Project:
    """The names that a key may use; `name` is None for a key of no project, which reaches everything."""

    name: str | None

    def stored(self, name: str) -> str:
        """Return a name from a request (of a run, `run@step`, a rollout or a call) as it is stored."""
        return name if self.name is None else f"{self.name}{SEPARATOR}{name}"

    def stored_source(self, source: str | None) -> str | None:
        """Return what a run is to start from as it is stored: a run, its step, or an uploaded adapter."""
        if source is not None and source.startswith(UPLOADED):
            return UPLOADED + self.stored(source.removeprefix(UPLOADED))
        return None if source is None else self.stored(source)

    def stored_teacher(self, teacher: str | None) -> str | None:
        """Return a teacher as it is stored. One without a step is a server of the operator, for everybody."""
        if teacher is None or parse_policy(teacher)[1] is None:
            return teacher
        return self.stored(teacher)

    def shown(self, stored: str) -> str:
        """Return a stored name of this project as its keys know it."""
        return stored if self.name is None else stored.removeprefix(f"{self.name}{SEPARATOR}")

    def owns(self, stored: str) -> bool:
        """Return True if a stored name belongs to this project."""
        return self.name is None or stored.startswith(f"{self.name}{SEPARATOR}")

    def told(self, text: str) -> str:
        """Return a message as this project may read it: its own names as it knows them, no others."""
        if self.name is None or SEPARATOR not in text:
            return text
        return _QUALIFIED.sub(lambda found: self.shown(found[0]) if self.owns(found[0]) else _ANOTHERS, text)

    def reason(self, text: str) -> str:
        """Return why calls wait, a text that names a run, as this project may read it."""
        if self.name is None or any(self.owns(found[0]) for found in _QUALIFIED.finditer(text)):
            return self.told(text)
        return f"the engines are busy with {_ANOTHERS}"

    def tell(self, error: Failure) -> Failure:
        """Return an error whose texts this project may read."""
        error.message, error.hint = self.told(error.message), self.told(error.hint)
        return error

    def registered(self, asked: str) -> str:
        """Return the project of a run that is registered; raise Forbidden for another than the key's."""
        if self.name is None:
            return asked
        if asked not in (*UNNAMED, self.name):
            raise Forbidden(
                f"the run asks for the project {asked!r}; this key has the project {self.name!r}",
                hint=f"leave the project out, or: insitu keys create NAME --scope submit --project {asked}",
            )
        return self.name


EVERYTHING = Project(None)


def told_to_all(text: str) -> str:
    """Return a message as anybody may read it, even without a key: no names of any project."""
    return _QUALIFIED.sub("a run of a project", text)


def project_of(stored: str) -> Project:
    """Return the project of a stored name."""
    project, separator, _ = stored.partition(SEPARATOR)
    return Project(project) if separator else EVERYTHING


def named_for(reader: str, run: str) -> str:
    """Return the stored name of a run, or step, for a message to those who see the run `reader`."""
    return run if project_of(reader).owns(run) else _ANOTHERS
