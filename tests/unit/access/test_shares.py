"""A common budget: whoever takes all it can leaves something for others, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.access.keyring import Holder
from insitu.access.projects import Project
from insitu.access.shares import Shares, Turns
from insitu.errors import Overloaded

OPERATOR = Holder("default", frozenset())


def key(name: str, project: str = "a") -> Holder:
    return Holder(name, frozenset(), Project(project))


def greedy(shares: Shares, *holders: Holder, amount: int = 1) -> int:
    """Take by turns until nobody may; return how much."""
    taken = 0
    while any(shares.may_take(one, amount) for one in holders):
        for one in holders:
            if shares.may_take(one, amount):
                shares.take(one, amount)
                taken += amount
    return taken


def test_one_key_reaches_a_half_and_one_project_two_thirds() -> None:
    assert greedy(Shares(300, "bytes"), key("one")) == 150
    assert greedy(Shares(300, "bytes"), *(key(f"key-{n}") for n in range(10))) == 200


def test_whoever_comes_late_finds_room() -> None:
    shares = Shares(300, "bytes")
    greedy(shares, *(key(f"key-{n}") for n in range(10)))
    assert greedy(shares, key("late", "b")) == 50, "a half of what was free"
    assert greedy(shares, key("later", "c")) == 25


def test_the_first_request_of_a_sender_needs_room_and_no_share() -> None:
    shares = Shares(100, "bytes")
    shares.take(key("one"), 90)
    shares.take(key("other", "b"), 10)
    with pytest.raises(Overloaded, match="100 of 100 are taken"):
        shares.take(key("third", "c"), 1)


def test_a_refusal_names_who_holds_what() -> None:
    shares = Shares(10, "uploads under way")
    greedy(shares, key("one"))
    with pytest.raises(Overloaded, match=r"this key has 5 of 10 already, .* while 5 are free"):
        shares.take(key("one"), 1)
    greedy(shares, key("two"), key("three"), key("four"))
    with pytest.raises(Overloaded, match="this project has 6 of 10 already"):
        shares.take(key("two"), 1)


def test_the_operators_own_key_takes_what_there_is() -> None:
    shares = Shares(10, "uploads under way")
    assert greedy(shares, OPERATOR) == 10
    shares.give_back(OPERATOR, 10)
    assert greedy(shares, key("one")) == 5


HOLDERS = [key("one"), key("two"), key("three", "b"), OPERATOR, None]
Move = tuple[int, int]


@given(st.lists(st.tuples(st.integers(0, len(HOLDERS) - 1), st.integers(0, 40)), max_size=60))
def test_nothing_is_lost_or_doubled(moves: list[Move]) -> None:
    shares, held = Shares(100, "bytes"), list[Move]()
    for who, amount in moves:
        if amount > 30 and held:
            one, given_back = held.pop(0)
            shares.give_back(HOLDERS[one], given_back)
        elif shares.may_take(HOLDERS[who], amount):
            shares.take(HOLDERS[who], amount)
            held.append((who, amount))
        assert shares.used == sum(amount for _, amount in held) <= 100
    for who, amount in held:
        shares.give_back(HOLDERS[who], amount)
    assert shares.used == 0
    assert not +shares._by_key
    assert not +shares._by_project
    assert greedy(shares, OPERATOR) == 100


async def test_whoever_waits_for_a_turn_gets_the_first_that_its_share_has() -> None:
    turns, order, end = Turns(4, "uploads"), list[str](), asyncio.Event()

    async def upload(holder: Holder) -> None:
        async with turns.turn(holder, 10):
            order.append(holder.key)
            await end.wait()

    busy = [asyncio.create_task(upload(key("busy"))) for _ in range(4)]
    await asyncio.sleep(0.01)
    assert order == ["busy", "busy"], "a half"
    late = [asyncio.create_task(upload(key("late", "b"))) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert order == ["busy", "busy", "late"]
    busy[3].cancel()
    await asyncio.sleep(0.01)
    end.set()
    await asyncio.gather(*busy[:3], *late)
    assert sorted(order) == ["busy"] * 3 + ["late"] * 2
    assert (turns._shares.used, turns._waiting) == (0, [])


async def test_a_turn_given_to_one_that_leaves_in_the_same_moment_is_given_back() -> None:
    turns = Turns(1, "uploads")

    async def held() -> None:
        async with turns.turn(OPERATOR, 10):
            pytest.fail("it has left")

    async with turns.turn(OPERATOR, 10):
        task = asyncio.create_task(held())
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert turns._shares.used == 0


async def test_a_wait_has_an_end_that_says_who_holds_the_places() -> None:
    turns = Turns(4, "uploads under way")
    async with turns.turn(key("one"), 1), turns.turn(key("one"), 1):
        with pytest.raises(Overloaded, match="has 2 of 4 already"):
            async with turns.turn(key("one"), 0.01):
                pytest.fail("its share is used up")
    assert (turns._shares.used, turns._waiting) == (0, [])


async def test_one_that_leaves_while_it_waits_disturbs_nobody() -> None:
    turns, got = Turns(1, "uploads"), list[str]()

    async def upload(name: str) -> None:
        async with turns.turn(OPERATOR, 10):
            got.append(name)

    async with turns.turn(OPERATOR, 10):
        left, stayed = asyncio.create_task(upload("left")), asyncio.create_task(upload("stayed"))
        await asyncio.sleep(0.01)
        left.cancel()  # its place in the queue is given up in a later turn of the loop
    await stayed
    assert (got, turns._shares.used) == (["stayed"], 0)
