"""Tests of the reward and the data; they need no backend: python -m pytest"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from reward import reward

from insitu import EvalItem

DATA = Path(__file__).parent / "data"


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


@pytest.mark.parametrize(
    ("answer", "score"),
    [("7", 1.0), (" 7.\n", 1.0), ("8", 0.3), ("The total is 7 euros.", 0.1), ("17 euros", 0.0), ("", 0.0)],
)
def test_the_reward_prefers_the_total_alone(answer: str, score: float) -> None:
    order = "Order: a mug for 4 euros, a pen for 3 euros."
    assert reward(EvalItem(id="order", input=order, expected="7", output=answer)) == score


@pytest.mark.parametrize("name", ["train.jsonl", "validation.jsonl"])
def test_every_answer_is_the_sum_of_the_prices(name: str) -> None:
    for row in rows(name):
        assert sum(map(int, re.findall(r"\d+", row["question"]))) == int(row["answer"]), row


def test_held_out_orders_are_not_trained_on() -> None:
    trained, held_out = (
        {tuple(sorted(re.findall(r"\d+", row["question"]))) for row in rows(name)}
        for name in ("train.jsonl", "validation.jsonl")
    )
    assert trained
    assert held_out
    assert not trained & held_out
