"""Redaction: removes the run's secrets from error messages of agents, evaluators and services.

Clients like to put a whole request into an error message. Prompts, answers and outputs stay unchanged,
because they are trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from pydantic import BaseModel, SecretStr

from insitu.config.config import Config
from insitu.config.values.secret import HIDDEN, names_a_secret
from insitu.user_traceback import UserTraceback

_MIN_CHARS = 8
"""Shorter values may be ordinary words, such as `default`, the key of a backend that was given none."""


class Redaction:
    """Knows every secret of a configuration."""

    def __init__(self, config: Config) -> None:
        found = {value for value in _secrets(config, False) if len(value) >= _MIN_CHARS}
        # Longest first, because one secret may be part of another.
        self._values = sorted(found, key=len, reverse=True)

    def hide(self, text: str) -> str:
        """Replace every secret in the text."""
        for value in self._values:
            text = text.replace(value, HIDDEN)
        return text

    def hide_traceback(self, raised: UserTraceback) -> UserTraceback:
        """Replace every secret in the traceback."""
        return UserTraceback(
            self.hide(raised.text), self.hide(raised.error), tuple(map(self.hide, raised.frames))
        )

    def hide_arguments(self, arguments: Sequence[str]) -> list[str]:
        """Hide secrets in a command line, including the values of `-o <path of a secret> <value>`."""
        before = ["", *arguments]
        return [
            HIDDEN if "." in path and names_a_secret(path.rpartition(".")[2]) else self.hide(argument)
            for path, argument in zip(before, arguments, strict=False)
        ]


def _secrets(value: object, secret: bool) -> Iterator[str]:
    """Yield every secret inside a value, recognized by its type or its name."""
    if isinstance(value, SecretStr):
        # In a header like "Bearer <key>", the last word is the secret.
        yield from (value.get_secret_value(), value.get_secret_value().rpartition(" ")[2])
    elif isinstance(value, str) and secret:
        yield value
    elif isinstance(value, BaseModel):
        fields = {name: getattr(value, name) for name in type(value).model_fields}
        yield from _secrets(fields | (value.model_extra or {}), secret)
    elif isinstance(value, Mapping):
        for key, each in cast("Mapping[object, object]", value).items():
            yield from _secrets(each, secret or names_a_secret(key))
    elif isinstance(value, list | tuple):
        for each in cast("Sequence[object]", value):
            yield from _secrets(each, secret)
