"""Forests of shared prefixes against brute force."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from insitu.training.trie import (
    cut,
    cut_for_ranks,
    lay_out,
    row_lengths,
    shared_prefixes,
    sorted_order,
)

Tokens = st.lists(st.sampled_from([0, 1, 2, 300, 70000]), min_size=1, max_size=6)


def arrays(sequences: list[list[int]]) -> list[np.ndarray]:
    return [np.array(ids, dtype=np.int64) for ids in sequences]


@given(st.lists(Tokens, max_size=12))
def test_the_order_is_that_of_the_tokens_and_stable(sequences: list[list[int]]) -> None:
    assert sorted_order(arrays(sequences)) == sorted(range(len(sequences)), key=lambda i: sequences[i])


def num_common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(st.lists(Tokens, min_size=1, max_size=10))
def test_a_row_holds_every_prefix_once_and_tokens_see_their_ancestors(sequences: list[list[int]]) -> None:
    sequences.sort()
    forest = lay_out(arrays(sequences), shared_prefixes(arrays(sequences)))
    prefixes = {tuple(ids[: i + 1]) for ids in sequences for i in range(len(ids))}
    assert len(forest.ids_l) == len(forest.end_l) == len(forest.depth_l) == len(prefixes)
    for ids, path in zip(sequences, forest.paths, strict=True):
        assert forest.ids_l[path].tolist() == ids
        assert forest.depth_l[path].tolist() == list(range(len(ids)))
        for i, place in enumerate(path.tolist()):
            seen = [j for j in range(len(prefixes)) if j <= place < forest.end_l[j]]
            assert seen == path[: i + 1].tolist()


def test_the_row_of_the_module_docstring() -> None:
    p, a, b, c, d, e = range(6)
    forest = lay_out(arrays([[p, p, a, a], [p, p, b, c, c], [d, d, e]]), np.array([0, 2, 0]))
    assert forest.ids_l.tolist() == [p, p, a, a, b, c, c, d, d, e]
    assert forest.depth_l.tolist() == [0, 1, 2, 3, 2, 3, 4, 0, 1, 2]
    assert forest.end_l.tolist() == [7, 7, 4, 4, 7, 7, 7, 10, 10, 10]


def brute_force(length: np.ndarray, shared: np.ndarray, limit: int) -> int:
    """The least cost of any allowed cut."""
    count, best = len(length), 10**9
    for marks in itertools.product([False, True], repeat=count - 1):
        cuts = [0, *(i + 1 for i, mark in enumerate(marks) if mark), count]
        rows = [range(a, b) for a, b in itertools.pairwise(cuts)]
        sizes = row_lengths(length, shared, rows)
        if all(size <= limit or len(row) == 1 for size, row in zip(sizes, rows, strict=True)):
            best = min(best, sum(sizes) + 64 * len(rows))
    return best


@given(st.lists(Tokens, min_size=1, max_size=8), st.integers(1, 30))
def test_cuts_keep_the_limit_and_repeat_as_little_as_possible(sequences: list[list[int]], limit: int) -> None:
    sequences = sorted([ids * 3 for ids in sequences])
    length, shared = np.array([len(ids) for ids in sequences]), shared_prefixes(arrays(sequences))
    assert shared.tolist() == [0, *(num_common(a, b) for a, b in itertools.pairwise(sequences))]
    rows = cut(length, shared, limit)
    assert [i for row in rows for i in row] == list(range(len(sequences)))
    sizes = row_lengths(length, shared, rows)
    for size, row in zip(sizes, rows, strict=True):
        members = arrays([sequences[i] for i in row])
        assert size == len(lay_out(members, shared_prefixes(members)).ids_l)
    assert all(size <= limit or len(row) == 1 for size, row in zip(sizes, rows, strict=True))
    assert sum(sizes) + 64 * len(rows) == brute_force(length, shared, limit)


def test_rows_end_between_trees_rather_than_repeat_a_prompt() -> None:
    groups = [[[g] * 400 + [10 + i] * 40 for i in range(8)] for g in range(4)]
    sequences = arrays([ids for group in groups for ids in group])
    length, shared = np.array([len(ids) for ids in sequences]), shared_prefixes(sequences)
    rows = cut(length, shared, 2048)
    assert row_lengths(length, shared, rows) == [1440, 1440]
    assert sum(row_lengths(length, shared, cut(length, shared, 500))) == 4 * (4 * 400 + 320)


def test_ranks_split_a_tree_when_that_is_faster() -> None:
    sequences = arrays([[1] * 100 + [10 + i] * 40 for i in range(8)])
    length, shared = np.array([len(ids) for ids in sequences]), shared_prefixes(sequences)
    assert row_lengths(length, shared, cut_for_ranks(length, shared, 2048, 2)) == [260, 260]
    assert row_lengths(length, shared, cut_for_ranks(length, shared, 2048, 1)) == [420]
