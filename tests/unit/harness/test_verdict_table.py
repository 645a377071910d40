"""The table of rules in docs/training.md is the one in the code."""

from __future__ import annotations

import re
from pathlib import Path

from insitu.harness.verdicts.rules import ALWAYS, ANY_METHOD, RULES, UNLESS_LEARNT, UNLESS_RISING, Rule, State

PAGE = Path(__file__).resolve().parents[3] / "docs" / "training.md"
BEGIN, END = "<!-- rules -->\n", "<!-- /rules -->"
TOLD = {
    ALWAYS: "always",
    UNLESS_RISING: "unless learning",
    UNLESS_LEARNT: "not learning or falling",
    frozenset({State.NOT_LEARNING}): "not learning",
    frozenset({State.TOO_EARLY}): "too early",
}
PLACES = {
    "llm": "llms.<name>",
    "training": "trainer_adapters.<name>.training",
    "builder": "trajectory_builders.<name>",
    "evaluator": "eval.evaluators.<name>",
    "output_dir": "<output_dir>",
    "ending": "<ending>",
    "sampling": "<setting>",
}


def row(rule: Rule) -> str:
    limits = ", ".join(f"{c.figure} {c.sign} {c.limit:g} ({c.release:g})" for c in rule.conditions)
    told = f"{TOLD[rule.states]}, from step {rule.steps}"
    if rule.methods != ANY_METHOD:
        told += f"; under {', '.join(sorted(rule.methods))}"
    setting = re.sub(r"`", "", rule.setting.format_map(PLACES)).replace("<", "\\<")
    return f"| `{rule.name}` | {limits} | {told} | {setting} | {rule.source} |"


def table() -> str:
    head = "| cause | when (until) | told | to try | why this limit |\n|---|---|---|---|---|\n"
    return head + "\n".join(map(row, RULES)) + "\n"


def test_the_page_shows_the_rules_as_they_are() -> None:
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert shown == table(), "copy the output of `python -m tests.unit.harness.test_verdict_table` there"


if __name__ == "__main__":
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
