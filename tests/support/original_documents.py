"""The documents of the original harness, whose configurations and commands must work here."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)\n(?P<body>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE
)


def original_documents() -> list[str]:
    """Their texts. They lie in `shared/seeds` beside the checkout or further up, and are not part of it."""
    for folder in Path(__file__).resolve().parents:
        found = sorted((folder / "shared" / "seeds").glob("*.txt"))
        if found:
            return [path.read_text() for path in found]
    pytest.skip("shared/seeds is not beside this checkout: its configurations cannot be tried")


def blocks(document: str, language: str) -> list[str]:
    """The code blocks of one language, as they would stand in a file."""
    found = _FENCE.finditer(document)
    return [textwrap.dedent(each["body"]) for each in found if each["language"] == language]
