"""The benchmark tasks: their rules, the bounds of their rewards, and what good and bad players earn."""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Callable, Sequence
from types import ModuleType

import pytest

from benchmarks.tasks import guess, search, sql, tictactoe
from benchmarks.tasks.conversation import Ask, Message
from examples.tictactoe import rules
from insitu import EvalItem, EvalResult

TASKS = (guess, tictactoe, search, sql)
Player = Callable[[str], str]
"""Reply to the last message of the conversation."""


def scripted(player: Player) -> Ask:
    async def ask(messages: Sequence[Message]) -> str:
        return player(messages[-1]["content"])

    return ask


async def results(task: ModuleType, player: Player, split: str = "held_out") -> list[EvalResult]:
    found: list[EvalResult] = []
    for row in task.rows(3, split):
        output = await task.episode(row["question"], scripted(player))
        found.append(task.reward(EvalItem(row["id"], row["question"], row["answer"], output)))
    return found


def mean_score(found: list[EvalResult]) -> float:
    return statistics.fmean(result.score or 0.0 for result in found)


def success(found: list[EvalResult]) -> float:
    return statistics.fmean(result.reasoning["success"] for result in found)


# Scripted players


def halving(said: str) -> str:
    low, high = map(int, re.findall(r"\d+", said))
    return str((low + high) // 2)


def winning(said: str) -> str:
    """Take a square that wins, then one that the other would win with, then the middle, a corner, any."""
    sides = {
        name: [int(n) for n in re.findall(r"\d", part)] for name, part in re.findall(r"(\w+):([ \d]+)", said)
    }
    free = sides["Free"]
    for side in ("X", "O"):
        for square in free:
            if rules.has_line([*sides.get(side, []), square]):
                return str(square)
    return str(next(square for square in (5, 1, 9, 3, 7, 2, 4, 6, 8) if square in free))


def searching(said: str) -> str:
    asked = re.match(r"What is the (\w+) of (\w+)\?", said)
    return f"search: {asked[2]} {asked[1]}" if asked else said.split()[-1]


def knowing_sql(said: str) -> str:
    return dict(sql.questions())[said]


PERFECT: dict[ModuleType, Player] = {guess: halving, search: searching, sql: knowing_sql, tictactoe: winning}
CONSTANT: dict[ModuleType, Player] = {
    guess: lambda _: "40",
    tictactoe: lambda _: "1",
    search: lambda _: "Oslo",
    sql: lambda _: "SELECT nothing",
}


@pytest.mark.parametrize("task", TASKS)
async def test_a_perfect_player_succeeds_and_a_constant_one_does_not(task: ModuleType) -> None:
    best, worst = await results(task, PERFECT[task]), await results(task, CONSTANT[task])
    assert success(best) >= (0.95 if task is tictactoe else 1.0)
    assert success(worst) == 0.0
    assert mean_score(best) >= 0.65
    assert mean_score(worst) <= 0.1


@pytest.mark.parametrize("task", TASKS)
async def test_rewards_stay_between_0_and_1(task: ModuleType) -> None:
    generator = random.Random(0)
    words = ("5", "17", "", "search: Ada pet", "SELECT 1", "SELECT price FROM items", "no", "-3", "9" * 5000)
    for player in (PERFECT[task], lambda _: generator.choice(words)):
        for result in await results(task, player, "train"):
            assert result.score is not None
            assert 0.0 <= result.score <= 1.0
            assert all(0.0 <= value <= guess.MAX_TURNS + 1 for value in result.reasoning.values())


@pytest.mark.parametrize("task", TASKS)
def test_no_example_is_both_trained_on_and_held_out(task: ModuleType) -> None:
    for seed in range(3):
        train, held_out = task.rows(seed, "train"), task.rows(seed, "held_out")
        assert len(held_out) >= 16
        assert not {repr(row["question"]) for row in train} & {repr(row["question"]) for row in held_out}
        assert len({row["id"] for row in train + held_out}) == len(train) + len(held_out)
        assert task.rows(seed, "train") == train
    assert task.rows(1, "train") != task.rows(2, "train")


# Guess


async def test_exact_halving_takes_4_44_guesses_for_the_held_out_numbers() -> None:
    numbers: list[float] = []
    for row in guess.rows(0, "held_out"):
        output = await guess.episode(row["question"], scripted(halving))
        item = EvalItem(row["id"], row["question"], row["answer"], output)
        numbers.append(guess.reward(item).reasoning["guesses"])
    assert statistics.fmean(numbers) == pytest.approx(4.44, abs=0.005), "docs/evidence.md says so"


@pytest.mark.parametrize(
    ("reply", "number"), [("17", 17), (" 17.\n", 17), ("18 to 22", None), ("it is 7", None)]
)
def test_only_a_number_is_a_guess(reply: str, number: int | None) -> None:
    assert guess.read(reply) == number


async def test_a_guess_outside_the_range_is_a_turn_lost() -> None:
    said: list[str] = []
    replies = iter(["16", "3", "none", "24", "20", "18"])

    async def ask(messages: Sequence[Message]) -> str:
        said.append(messages[-1]["content"])
        return next(replies)

    output = await guess.episode({"secret": 18}, ask)
    assert said[1:] == ["17 to 32?"] * 3 + ["17 to 23?", "17 to 19?"]
    assert (output["guesses"], output["solved"]) == ([16, 3, None, 24, 20, 18], True)
    assert [told > 0 for told in output["told"]] == [True, False, False, True, True, True]


def test_the_middle_tells_most_and_luck_earns_nothing() -> None:
    told = [guess.information(number, 1, 32) for number in range(33)]
    assert told[0] == guess.information(None, 1, 32) == guess.information(33, 1, 32) == 0.0
    assert told[1:17] == sorted(told[1:17]), "the nearer the middle, the more it tells"
    assert told[16] == told[17] == pytest.approx(1.0)
    assert 0.1 < told[1] < 0.3
    assert guess.information(7, 7, 7) == 1.0
    lucky = guess.reward(EvalItem("a", {}, 1, {"guesses": [1], "told": [told[1]], "solved": True}))
    assert lucky.score == pytest.approx(told[1], abs=1e-4)


# Tic-tac-toe


@pytest.mark.parametrize(
    ("reply", "move"), [("4", 4), (" Square 4!", 4), ("45", None), ("5", None), ("x", None)]
)
def test_a_move_is_the_first_number_if_that_square_is_free(reply: str, move: int | None) -> None:
    assert rules.legal_move(reply, rules.free([5], [1])) == move


def test_the_board_names_both_sides_and_what_is_free() -> None:
    assert rules.shown([], []) == "Free: 1 2 3 4 5 6 7 8 9"
    assert rules.shown([5, 9], [1]) == "X: 5 9 O: 1 Free: 2 3 4 6 7 8"


async def test_the_same_moves_meet_the_same_opponent() -> None:
    games = [await tictactoe.episode({"opponent": "0/7"}, scripted(winning)) for _ in range(2)]
    assert games[0] == games[1]


async def test_a_random_legal_player_loses_some_games_and_earns_less_than_a_good_one() -> None:
    generator = random.Random(1)

    def any_free(said: str) -> str:
        return generator.choice(said.partition("Free: ")[2].split())

    found = await results(tictactoe, any_free, "train") + await results(tictactoe, any_free)
    assert success(found) == pytest.approx(0.7, abs=0.02), "docs/evidence.md says so"
    assert all(result.reasoning["legal"] == 1.0 for result in found)
    assert mean_score(found) < mean_score(await results(tictactoe, winning, "train"))


# Search


def test_there_are_60_facts() -> None:
    known = search.facts()
    assert len(known) == 60
    assert search.look_up(" rosa  JOB") == f"Rosa works as a {known['Rosa', 'job']}."
    assert search.look_up("Rosa") is None


async def test_an_answer_without_the_fact_earns_nothing() -> None:
    (row, *_) = search.rows()
    guessed = await search.episode(row["question"], scripted(lambda _: row["answer"]))
    assert search.reward(EvalItem("a", row["question"], row["answer"], guessed)).score == 0.0


async def test_searching_for_ever_ends() -> None:
    (row, *_) = search.rows()
    query = f"search: {row['question']['name']} {row['question']['kind']}"
    endless = await search.episode(row["question"], scripted(lambda _: query))
    assert len(endless["searches"]) == search.MAX_TURNS
    assert search.reward(EvalItem("a", row["question"], row["answer"], endless)).score == 0.4


# SQL


async def test_a_failed_query_may_be_written_again_once() -> None:
    said: list[str] = []
    replies = iter(["SELECT cost FROM items", "SELECT price FROM items WHERE name = 'lamp'"])

    async def ask(messages: Sequence[Message]) -> str:
        said.append(messages[-1]["content"])
        return next(replies)

    output = await sql.episode("What is the price of the lamp?", ask)
    assert said[1] == "Error: no such column: cost. What is the price of the lamp?"
    assert sql.reward(EvalItem("a", "", "28", output)).score == 0.8


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("DROP TABLE items", "not authorized"),
        ("ATTACH ':memory:' AS other", "not authorized"),
        ("DELETE FROM items", "not authorized"),
        ("PRAGMA writable_schema = 1", "not authorized"),
        ("SELECT 1; DROP TABLE items", "one statement at a time"),
        (f"SELECT count(*) FROM {', '.join(f'items i{number}' for number in range(9))}", "interrupted"),
        ("", "no rows"),
    ],
)
def test_a_query_may_only_read_and_not_for_ever(query: str, reason: str) -> None:
    result, error = sql.run(query)
    assert result is None
    assert reason in error
