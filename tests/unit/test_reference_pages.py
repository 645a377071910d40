"""The pages that repeat what the code says: every setting, and messages that users search for."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.literals import literals
from tools import configuration_page, models_page

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = ROOT / "docs" / "troubleshooting.md"


def test_the_page_of_settings_is_that_of_the_schema() -> None:
    schema = json.loads(configuration_page.SCHEMA.read_text())
    again = "python tools/configuration_page.py"
    assert configuration_page.PAGE.read_text() == configuration_page.page(schema), f"write it: {again}"


def test_every_definition_of_the_schema_is_on_the_page() -> None:
    schema = json.loads(configuration_page.SCHEMA.read_text())
    listed = {name for section in configuration_page.sections(schema) for name in section.names}
    assert set(schema["$defs"]) - {"variable"} == listed


def test_the_page_of_models_is_that_of_the_table() -> None:
    assert models_page.PAGE.read_text() == models_page.page(), "write it: python tools/models_page.py"


def test_messages_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (`+)(.+?)\1 \|", MESSAGES.read_text(), re.MULTILINE)
    said = [text for path in (ROOT / "src").rglob("*.py") for text in literals(path.read_text())]
    patterns = {message: re.escape(message.strip()).replace("…", ".*") for _, message in rows}
    assert len(patterns) > 20
    assert not [
        message for message, pattern in patterns.items() if not any(re.search(pattern, t) for t in said)
    ]
