"""Token sequences → a forest of shared prefixes, cut into rows and written out in depth-first order.

A sequence shares most with its neighbours in sorted order, so a row is a run of sorted sequences, and each
adds only what follows its longest common prefix with the one before::

    p p a a            row      p p a a b c c d d e       the tokens of both trees, none twice
    p p b c c          depth    0 1 2 3 2 3 4 0 1 2       = position ids
    d d e              end      7 7 4 4 7 7 7 10 10 10    where the subtree of the token ends

Token j is visible to token i when ``j <= i < end[j]``: a token sees its ancestors and itself, nothing of
other branches or trees. Packing and sharing are thus the same thing, and a vector describes the mask.

Shape suffixes: l tokens of a row, n sequences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32 | np.int64]

_ROW_TOKENS = 64
"""Overhead of one more row, in tokens: passes over the layers, kernels on short inputs."""


@dataclass(frozen=True, slots=True)
class Forest:
    """Sequences laid out as one row; `paths` has the places of each one's tokens, in the given order."""

    ids_l: Ints
    depth_l: Ints
    end_l: Ints
    paths: list[Ints]


def sorted_order(sequences: Sequence[Ints]) -> list[int]:
    """Return the indices that sort the sequences lexicographically by token; the sort is stable."""
    # big-endian bytes compare like the numbers, at memory speed
    keys = [ids.astype(">u4").tobytes() for ids in sequences]
    return sorted(range(len(sequences)), key=keys.__getitem__)


def shared_prefixes(sequences: Sequence[Ints]) -> Ints:
    """Count the leading tokens each sequence shares with the one before it; 0 for the first."""
    shared_n = np.zeros(len(sequences), dtype=np.int64)
    for n in range(1, len(sequences)):
        width = min(len(sequences[n - 1]), len(sequences[n]))
        differ = sequences[n - 1][:width] != sequences[n][:width]
        shared_n[n] = differ.argmax() if differ.any() else width
    return shared_n


def row_lengths(length_n: Ints, shared_n: Ints, rows: Sequence[range]) -> list[int]:
    """Return each row's length: the whole first sequence, plus what each further one does not share."""
    added = np.concatenate([[0], np.cumsum(length_n - shared_n)])
    return [int(added[row.stop] - added[row.start] + shared_n[row.start]) for row in rows]


def cut(length_n: Ints, shared_n: Ints, max_tokens: int) -> list[range]:
    """Cut sorted sequences into rows of at most `max_tokens`, repeating as few tokens as possible.

    A row that starts at sequence i repeats the ``shared[i]`` tokens in common with the sequence before, so
    with ``waste(0) = 0``::

        waste(j) = min over i of waste(i) + shared[i] + cost of a row,   where the row i..j fits

    Rows only shrink when they start later, so a sliding minimum makes this linear. A sequence longer than
    `max_tokens` gets a row to itself.
    """
    count = len(length_n)
    added: list[int] = [0, *np.cumsum(length_n - shared_n).tolist()]
    shared: list[int] = shared_n.tolist()
    waste, came_from = [0] * (count + 1), [0] * (count + 1)
    starts: deque[int] = deque()  # rows that may still be open, cheapest first
    for stop in range(1, count + 1):
        start = stop - 1
        while starts and waste[starts[-1]] + shared[starts[-1]] >= waste[start] + shared[start]:
            starts.pop()
        starts.append(start)
        while starts[0] < start and added[stop] - added[starts[0]] + shared[starts[0]] > max_tokens:
            starts.popleft()
        came_from[stop] = starts[0]
        waste[stop] = waste[starts[0]] + shared[starts[0]] + _ROW_TOKENS
    rows: list[range] = []
    stop = count
    while stop > 0:
        rows.append(range(came_from[stop], stop))
        stop = came_from[stop]
    return rows[::-1]


def cut_for_ranks(length_n: Ints, shared_n: Ints, max_tokens: int, world_size: int) -> list[range]:
    """Like `cut`, but minimise the time of ranks that work in lockstep.

    Ranks take the rows in rounds, longest first, and wait for the longest of each round. Several limits up
    to `max_tokens` are tried: shorter rows repeat more shared tokens but leave fewer ranks idle.
    """
    if world_size == 1 or len(length_n) == 0:
        return cut(length_n, shared_n, max_tokens)
    total = int((length_n - shared_n).sum())
    fewest = -(-total // (world_size * max_tokens))
    even = [total / (world_size * rounds) for rounds in range(fewest, fewest + 3)]
    limits = {min(max_tokens, int(part * extra)) for part in even for extra in (1, 1.05, 1.1, 1.25, 1.5, 2)}
    candidates = [cut(length_n, shared_n, limit) for limit in sorted(limits, reverse=True)]
    return min(candidates, key=lambda rows: _lockstep(row_lengths(length_n, shared_n, rows), world_size))


def _lockstep(lengths: Sequence[int], world_size: int) -> int:
    longest_of_rounds = sorted(lengths, reverse=True)[::world_size]
    return sum(longest_of_rounds) + _ROW_TOKENS * len(longest_of_rounds)


def lay_out(sequences: Sequence[Ints], shared_n: Ints) -> Forest:
    """Lay sorted sequences out as one row; `shared_n` counts what each shares with the one before (first: 0).

    The path of the last sequence so far is the stack of the depth-first walk.
    """
    ids: list[Ints] = []
    depths: list[Ints] = []
    paths: list[Ints] = []
    length_n = np.array([len(ids) for ids in sequences], dtype=np.int64)
    end_l = np.empty(int((length_n - shared_n).sum()), dtype=np.int64)
    path: Ints = np.empty(0, dtype=np.int64)
    filled = 0
    for sequence, shared in zip(sequences, shared_n.tolist(), strict=True):
        end_l[path[shared:]] = filled  # subtrees the next sequence does not share end here
        num_added = len(sequence) - shared
        path = np.concatenate([path[:shared], np.arange(filled, filled + num_added)])
        ids.append(sequence[shared:])
        depths.append(np.arange(shared, len(sequence)))
        paths.append(path)
        filled += num_added
    end_l[path] = filled
    return Forest(np.concatenate(ids), np.concatenate(depths), end_l, paths)
