"""examples/tools: the shop, its two tools, the questions and the reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.tools.reward import reward
from examples.tools.shop import ITEMS, PRICES, STOCK, TOOLS, use
from insitu import EvalItem

DATA = Path(__file__).resolve().parents[3] / "examples" / "tools" / "data"
ROW = {"needed": ["price lamp", "stock lamp"]}


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


FILES = sorted(path.name for path in DATA.glob("*.jsonl"))


def call(tool: str, **arguments: str) -> dict[str, Any]:
    """A model call that asks for a tool."""
    asked = {"id": "t", "function": {"name": tool, "arguments": json.dumps(arguments)}}
    return {"id": f"mc-{tool}", "messages": [], "answer": {"tool_calls": [asked]}}


def score(output: str, *calls: dict[str, Any]) -> float:
    result = reward(EvalItem("lamp-worth", "", "100", output, ROW, calls))  # type: ignore[arg-type]
    assert result.score is not None
    return result.score


@pytest.mark.parametrize(
    ("output", "calls", "expected"),
    [
        ("100", [], 1.0),
        (" 100.\n", [call("price", item="lamp")], 1.0),
        ("It is 100 euros.", [call("price", item="lamp"), call("stock", item=" Lamp ")], 0.4),
        ("99", [call("price", item="lamp"), call("stock", item="lamp")], 0.4),
        ("99", [call("price", item="lamp")], 0.1),
        ("", [call("price", goods="lamp")], 0.1),
        ("99", [], 0.0),
        ("", [], 0.0),
        ("I do not know.", [], 0.0),
    ],
)
def test_the_number_counts_and_so_do_the_lookups(
    output: str, calls: list[dict[str, Any]], expected: float
) -> None:
    assert score(output, *calls) == expected


def test_arguments_that_are_no_object_are_no_lookup() -> None:
    asked = {"id": "t", "function": {"name": "price", "arguments": '"lamp"'}}
    assert score("", {"id": "mc", "messages": [], "answer": {"tool_calls": [asked]}}) == 0.0


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("price", '{"item": "lamp"}', str(PRICES["lamp"])),
        ("stock", '{"item": " Lamp "}', str(STOCK["lamp"])),
        ("price", '{"item": "dragon"}', "There is no dragon."),
        ("price", '{"thing": "lamp"}', 'The arguments must be {"item": "…"}.'),
        ("price", "lamp", 'The arguments must be {"item": "…"}.'),
        ("price", '["lamp"]', 'The arguments must be {"item": "…"}.'),
        ("weight", "{}", "There is no tool weight."),
    ],
)
def test_tools_answer_also_to_wrong_calls(tool: str, arguments: str, said: str) -> None:
    assert use(tool, arguments) == said


@pytest.mark.parametrize("name", FILES)
def test_every_answer_follows_from_the_needed_lookups(name: str) -> None:
    for row in rows(name):
        found = [int(use(tool, json.dumps({"item": item}))) for tool, item in map(str.split, row["needed"])]
        if row["id"].endswith("-worth"):
            answer = found[0] * found[1]
        elif row["id"].endswith("-order"):
            answer = found[0] * int(row["question"].split()[2])
        else:
            (answer,) = found
        assert row["answer"] == str(answer), row["id"]


def test_no_item_is_both_trained_on_and_held_out() -> None:
    for name in ("lookups", "sums"):
        trained, held_out = (
            {row["id"].partition("-")[0] for row in rows(f"{name}-{part}.jsonl")}
            for part in ("train", "validation")
        )
        assert trained | held_out == set(ITEMS)
        assert not trained & held_out


def test_tools_are_described_as_they_are_named() -> None:
    described = [tool["function"] for tool in TOOLS]
    assert [function["name"] for function in described] == ["price", "stock"]  # type: ignore[index]
