"""examples/deduction: every puzzle has exactly one solution, found by a solver that reads its text."""

from __future__ import annotations

import json
import random
import re
import statistics
from collections.abc import Iterator
from itertools import permutations, product
from pathlib import Path

import pytest

from examples.deduction.puzzles import LARGE, SMALL, Size, make_puzzle, make_puzzles
from examples.deduction.reward import reward
from insitu import EvalItem

DATA = Path(__file__).resolve().parents[3] / "examples" / "deduction" / "data"
Fact = dict[str, str]
"""A person with room, hour and tool."""
SAID = {"was in the": "room", "came at": "hour", "had the": "tool"}
DENIED = {"was not in the": "room", "did not come at": "hour", "did not have the": "tool"}


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


FILES = sorted(path.name for path in DATA.glob("*.jsonl"))


# A solver that knows nothing of the generator: it reads English


def possibilities(first_line: str) -> Iterator[list[Fact]]:
    people = re.split(r", | and ", first_line.partition(" were each ")[0])
    lists = {
        kind: listed.split(", ") for kind, listed in re.findall(r"different (\w+) \(([^)]*)\)", first_line)
    }
    for values in product(*(permutations(listed) for listed in lists.values())):
        columns = dict(zip(lists, values, strict=True))
        yield [
            {"name": name, **{kind: column[at] for kind, column in columns.items()}}
            for at, name in enumerate(people)
        ]


def holds(clue: str, facts: list[Fact]) -> bool:
    by_name = {fact["name"]: fact for fact in facts}
    if found := re.fullmatch(r"(\w+) came before (\w+)\.", clue):
        return int(by_name[found[1]]["hour"]) < int(by_name[found[2]]["hour"])
    if found := re.fullmatch(r"(\w+) came one hour after (\w+)\.", clue):
        return int(by_name[found[1]]["hour"]) == int(by_name[found[2]]["hour"]) + 1
    phrases = "|".join([*SAID, *DENIED])
    if found := re.fullmatch(rf"Whoever ({phrases}) (\w+) ({phrases}) (\w+)\.", clue):
        kinds = SAID[found[1]], SAID[found[3]]
        return any(fact[kinds[0]] == found[2] and fact[kinds[1]] == found[4] for fact in facts)
    found = re.fullmatch(rf"(\w+) ({phrases}) (\w+)\.", clue)
    assert found, clue
    denied = found[2] in DENIED
    kind = (DENIED if denied else SAID)[found[2]]
    return (by_name[found[1]][kind] == found[3]) is not denied


def solve(question: str, left_out: int | None = None) -> list[str]:
    """Return the answer in every possibility that the clues leave."""
    first, *lines, asked = question.splitlines()
    clues = [line.removeprefix("- ") for at, line in enumerate(lines) if at != left_out]
    found = re.match(r"Who (was in the|had the) (\w+)", asked)
    assert found
    kind = SAID[found[1]]
    answers: list[str] = []
    for facts in possibilities(first):
        if all(holds(clue, facts) for clue in clues):
            (who,) = [fact for fact in facts if fact[kind] == found[2]]
            answers.append(", ".join(who[part] for part in ("name", "room", "hour") if part != kind))
    return answers


@pytest.mark.parametrize("name", FILES)
def test_every_puzzle_has_one_solution_and_it_is_the_answer(name: str) -> None:
    for row in rows(name)[:: 1 if "small" in name else 16]:
        assert solve(row["question"]) == [row["answer"]], row["id"]


def test_no_clue_can_be_left_out() -> None:
    for row in rows("small-train.jsonl"):
        for clue in range(row["question"].count("\n- ")):
            assert len(solve(row["question"], left_out=clue)) > 1, row["id"]


@pytest.mark.parametrize("seed", range(20))
def test_new_seeds_give_puzzles_with_one_solution(seed: int) -> None:
    puzzle = make_puzzle(SMALL, random.Random(seed))
    assert solve(puzzle.question) == [puzzle.answer]


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_the_same_seed_gives_the_same_puzzles(size: Size) -> None:
    questions = [puzzle.question for puzzle in make_puzzles(size, 3, 1)]
    assert questions == [puzzle.question for puzzle in make_puzzles(size, 3, 1)]
    assert questions != [puzzle.question for puzzle in make_puzzles(size, 3, 2)]
    assert len(set(questions)) == 3


def test_no_answer_is_said_outright() -> None:
    """A clue that names the person together with what the question gives would leave nothing to deduce."""
    for name in FILES:
        for row in rows(name):
            asked = re.search(r"Who (was in the|had the) (\w+)", row["question"])
            assert asked
            who = row["answer"].partition(",")[0]
            assert f"- {who} {asked[1]} {asked[2]}." not in row["question"], row["id"]


@pytest.mark.parametrize("size", ["small", "large"])
def test_no_puzzle_is_both_trained_on_and_held_out(size: str) -> None:
    trained, held_out = rows(f"{size}-train.jsonl"), rows(f"{size}-validation.jsonl")
    assert len(trained) == 96
    assert len(held_out) == 32
    assert not {row["question"] for row in trained} & {row["question"] for row in held_out}


def score(output: str, expected: str = "Ben, attic, 9") -> float:
    result = reward(EvalItem("puzzle", "", expected, output))
    assert result.score is not None
    return result.score


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("Ben, attic, 9", 1.0),
        ("ben , Attic, 9.", 1.0),
        ("Ada came first, so…\n\n**Answer:** Ben, attic, 9\n", 1.0),
        ("Ben, attic, 8", 0.5),
        ("Ben, cellar, 8", 0.2),
        ("Ada, cellar, 8", 0.1),
        ("Ben, 9", 0.0),
        ("Ben", 0.0),
        ("", 0.0),
        ("\n\n", 0.0),
        ("I do not know.", 0.0),
    ],
)
def test_each_part_that_is_right_earns_something(output: str, expected: float) -> None:
    assert score(output) == pytest.approx(expected)


@pytest.mark.parametrize("name", FILES)
def test_the_gold_answer_earns_all_and_a_constant_one_little(name: str) -> None:
    found = rows(name)
    assert {score(row["answer"], row["answer"]) for row in found} == {1.0}
    constant = found[0]["answer"]
    assert statistics.fmean(score(constant, row["answer"]) for row in found) < 0.4
