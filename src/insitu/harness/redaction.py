"""Redaction: what agents, evaluators and services say about their failures, without the run's secrets.

Clients like to put a whole request into an error message. Prompts, answers and outputs are left as they are:
they are what is trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic import BaseModel, SecretStr

from insitu.config.config import Config
from insitu.config.secret import HIDDEN, names_a_secret

_MIN_CHARS = 8
"""Shorter ones are words like any other; `default`, the key of a backend that was given none, among them."""


class Redaction:
    """Knows every secret of a configuration."""

    def __init__(self, config: Config) -> None:
        found = {value for value in _secrets(config, False) if len(value) >= _MIN_CHARS}
        # The longest first: one may be part of another.
        self._values = sorted(found, key=len, reverse=True)

    def hide(self, text: str) -> str:
        """The text with every secret replaced."""
        for value in self._values:
            text = text.replace(value, HIDDEN)
        return text

    def hide_arguments(self, arguments: Sequence[str]) -> list[str]:
        """A command line without secrets: also without the values of `-o <path of a secret> <value>`."""
        before = ["", *arguments]
        return [
            HIDDEN if "." in path and names_a_secret(path.rpartition(".")[2]) else self.hide(argument)
            for path, argument in zip(before, arguments, strict=False)
        ]


def _secrets(value: Any, secret: bool) -> Iterator[str]:
    """Every secret below a value: by its type, or by the name that it has."""
    if isinstance(value, SecretStr):
        # A header like "Bearer <key>" has its secret in the last word.
        yield from (value.get_secret_value(), value.get_secret_value().rpartition(" ")[2])
    elif isinstance(value, str) and secret:
        yield value
    elif isinstance(value, BaseModel):
        fields = {name: getattr(value, name) for name in type(value).model_fields}
        yield from _secrets(fields | (value.model_extra or {}), secret)
    elif isinstance(value, Mapping):
        for key, each in cast("Mapping[Any, Any]", value).items():
            yield from _secrets(each, secret or names_a_secret(key))
    elif isinstance(value, list | tuple):
        for each in cast("Sequence[Any]", value):
            yield from _secrets(each, secret)
