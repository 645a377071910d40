"""Note: a remark about a place in a configuration file."""

from __future__ import annotations

from dataclasses import dataclass

from insitu.compat.nemo.marked_text import MarkedText
from insitu.config.values.problems import Location, dotted
from insitu.config.values.secret import names_a_secret, shown, without_credentials


@dataclass(frozen=True, slots=True)
class Note:
    """One remark and the place it is about."""

    path: str
    text: str
    line: int | None = None
    """Line in the file that was read; None if the place is not in it."""
    value: str | None = None
    """As a person would write it; never a secret."""
    yaml: str | None = None
    """YAML to write instead."""

    def to_dict(self) -> dict[str, str | int]:
        """Return the fields that are set."""
        fields = {
            "path": self.path,
            "line": self.line,
            "value": self.value,
            "text": self.text,
            "yaml": self.yaml,
        }
        return {name: value for name, value in fields.items() if value is not None}


def note_at(
    marked: MarkedText, location: Location, text: str, value: object = None, yaml: str | None = None
) -> Note:
    """Make a note about a location in the text."""
    secret = any(names_a_secret(part) for part in location)
    said = None if value is None or secret else without_credentials(shown(value))
    return Note(dotted(location), without_credentials(text), marked.line(location), said, yaml)
