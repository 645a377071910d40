"""Seeded deduction puzzles in the manner of Clue: who was where, when and with what.

Everybody was in another room at another hour (and had another tool). A puzzle is a set of clues that leaves
exactly one possibility, and of which none can be left out. The question asks about one of the people:

    Ada, Ben and Cleo were each in a different room (attic, cellar, kitchen), at a different hour (8, 9, 10).
    - Ben came before Ada.
    - …
    Who was in the cellar, and when?                                     Ben, 8
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product

PEOPLE = ("Ada", "Ben", "Cleo", "Dora")
VALUES = {
    "room": ("attic", "cellar", "kitchen", "library"),
    "hour": ("8", "9", "10", "11"),
    "tool": ("candle", "ladder", "rope", "spade"),
}
WHERE = {"room": "was in the {}", "hour": "came at {}", "tool": "had the {}"}
NOT = {"room": "was not in the {}", "hour": "did not come at {}", "tool": "did not have the {}"}
QUESTIONS = {
    ("room", "hour"): "Who was in the {}, and when?",
    ("room", "hour", "tool"): "Who had the {}, in which room and when?",
}

World = dict[str, tuple[str, ...]]
"""One possibility: of each attribute the values of all people, in their order."""


@dataclass(frozen=True, slots=True)
class Size:
    """A kind of puzzle: so many people, and what is to be found out about them."""

    num_people: int
    attributes: tuple[str, ...]

    @property
    def people(self) -> tuple[str, ...]:
        return PEOPLE[: self.num_people]

    def values(self, attribute: str) -> tuple[str, ...]:
        return VALUES[attribute][: self.num_people]

    @property
    def asked_by(self) -> str:
        """The attribute that the question gives; the answer has the person and the others."""
        return "tool" if "tool" in self.attributes else "room"


SMALL = Size(3, ("room", "hour"))
LARGE = Size(4, ("room", "hour", "tool"))


@dataclass(frozen=True, slots=True)
class Clue:
    """A sentence, and the possibilities that it leaves."""

    text: str
    leaves: frozenset[int]
    """Places in `every_world()`."""
    plain: bool
    """It says outright where, when or with what a person was; such clues are used last."""


@dataclass(frozen=True, slots=True)
class Puzzle:
    """A question with exactly one answer."""

    question: str
    answer: str


Sentence = tuple[str, Callable[[World], bool], bool]


def sentences(size: Size) -> Iterator[Sentence]:
    """Yield every sentence of our kinds, how to tell whether it is true, and whether it is a plain one."""
    for person, name in enumerate(size.people):
        for attribute in size.attributes:
            for value in size.values(attribute):
                place = (attribute, person, value)
                yield f"{name} {WHERE[attribute].format(value)}.", _is(*place), True
                yield f"{name} {NOT[attribute].format(value)}.", _is_not(*place), False
    for first, second in permutations(range(size.num_people), 2):
        names = size.people[first], size.people[second]
        yield f"{names[0]} came before {names[1]}.", _is_before(first, second), False
        yield f"{names[1]} came one hour after {names[0]}.", _is_one_hour_after(first, second), False
    for one, other in permutations(size.attributes, 2):
        if one != "hour":  # "whoever came at 9 …" is said from the other side
            for first, second in product(size.values(one), size.values(other)):
                said = f"Whoever {WHERE[one].format(first)} {WHERE[other].format(second)}."
                yield said, _go_together(one, first, other, second), False


def _is(attribute: str, person: int, value: str) -> Callable[[World], bool]:
    return lambda world: world[attribute][person] == value


def _is_not(attribute: str, person: int, value: str) -> Callable[[World], bool]:
    return lambda world: world[attribute][person] != value


def _is_before(first: int, second: int) -> Callable[[World], bool]:
    return lambda world: int(world["hour"][first]) < int(world["hour"][second])


def _is_one_hour_after(first: int, second: int) -> Callable[[World], bool]:
    return lambda world: int(world["hour"][first]) + 1 == int(world["hour"][second])


def _go_together(one: str, first: str, other: str, second: str) -> Callable[[World], bool]:
    return lambda world: world[other][world[one].index(first)] == second


@cache
def every_world(size: Size) -> list[World]:
    """Return every possibility."""
    every = product(*(permutations(size.values(name)) for name in size.attributes))
    return [dict(zip(size.attributes, world, strict=True)) for world in every]


@cache
def every_clue(size: Size) -> list[Clue]:
    """Return every clue that is true of some possibility."""
    worlds = every_world(size)
    clues = [
        Clue(text, frozenset(at for at, world in enumerate(worlds) if holds(world)), plain)
        for text, holds, plain in sentences(size)
    ]
    return [clue for clue in clues if clue.leaves]


def make_puzzle(size: Size, generator: random.Random) -> Puzzle:
    """Draw a possibility and clues about it, until it is the only one left."""
    worlds = every_world(size)
    truth = generator.randrange(len(worlds))
    pool = [clue for clue in every_clue(size) if truth in clue.leaves]
    generator.shuffle(pool)
    pool.sort(key=lambda clue: clue.plain)
    chosen: list[Clue] = []
    left = frozenset(range(len(worlds)))
    for clue in pool:
        if len(left) > 1 and not left <= clue.leaves:
            chosen.append(clue)
            left &= clue.leaves
    clues = needed(chosen)
    person = generator.randrange(size.num_people)
    return Puzzle(_question(size, clues, worlds[truth], person), _answer(size, worlds[truth], person))


def needed(clues: Sequence[Clue]) -> list[Clue]:
    """Leave out every clue that the others make superfluous."""
    kept = list(clues)
    for clue in clues:
        others = [other for other in kept if other is not clue]
        if len(frozenset.intersection(*(other.leaves for other in others))) == 1:
            kept = others
    return kept


def _question(size: Size, clues: Sequence[Clue], truth: World, person: int) -> str:
    people = f"{', '.join(size.people[:-1])} and {size.people[-1]}"
    spread = [
        f"{'at' if name == 'hour' else 'with' if name == 'tool' else 'in'} a different {name} "
        f"({', '.join(size.values(name))})"
        for name in size.attributes
    ]
    asked = QUESTIONS[size.attributes].format(truth[size.asked_by][person])
    listed = "\n".join(f"- {clue.text}" for clue in clues)
    return f"{people} were each {', '.join(spread)}.\n{listed}\n{asked}"


def _answer(size: Size, truth: World, person: int) -> str:
    found = [truth[name][person] for name in size.attributes if name != size.asked_by]
    return ", ".join([size.people[person], *found])


def make_puzzles(size: Size, count: int, seed: int) -> list[Puzzle]:
    """Return puzzles of which no two have the same question; the same seed gives the same ones."""
    generator = random.Random(seed)  # noqa: S311 - puzzles, not secrets
    found: dict[str, Puzzle] = {}
    while len(found) < count:
        puzzle = make_puzzle(size, generator)
        found.setdefault(puzzle.question, puzzle)
    return list(found.values())
