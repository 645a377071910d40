"""docs/coming-from-nemo.md: its YAML is read, its functions run, its links and options exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from insitu.cli.migrate import migrate as command
from insitu.compat.nemo.migration import migrate
from insitu.config import Config
from tests.support.original_documents import blocks

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "coming-from-nemo.md").read_text()


def test_its_links_lead_somewhere() -> None:
    titles = {
        re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
        for title in re.findall(r"^#+ (.*)", TEXT, re.M)
    }
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        if target.startswith("#"):
            assert target[1:] in titles
        else:
            assert (ROOT / "docs" / target.partition("#")[0]).exists(), target


def test_its_yaml_is_read() -> None:
    old_client, workflow = blocks(TEXT, "yaml")
    moved = yaml.safe_load(migrate(old_client, "docs", {}).text)
    assert moved["trainer_adapters"]["art_adapter"]["backend"]["ip"] == "localhost"
    config = Config.model_validate(yaml.safe_load(workflow))
    assert config.workflow is not None


def test_its_functions_do_what_the_old_ones_did() -> None:
    scope: dict[str, Any] = {}
    for code in blocks(TEXT, "python"):
        ast.parse(code)
        if code.startswith("# insitu's"):
            exec(code, scope)  # the documentation's own
    reward = scope["addition_reward"]
    assert reward(SimpleNamespace(output=" 7 ", expected=7)) == 1.0
    assert reward(SimpleNamespace(output="8", expected=7)) == 0.0
    assert "addition" in scope


def test_its_options_and_exit_codes_are_those_of_the_command() -> None:
    section = TEXT[TEXT.index("Options: ") :].partition("\n\n")[0]
    known = {option for each in command.params for option in each.opts}
    assert set(re.findall(r"`(--?\w+)", section)) <= known
    said = re.findall(r"(\d) (?:the|something|wrong)", section)
    assert said == re.findall(r"(\d) (?:the|something|wrong)", re.sub(r"\s+", " ", command.help or ""))
