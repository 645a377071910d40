"""PrefixTree: sequences of token ids as a tree that forks at the first differing token. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Node:
    """The tokens from one fork to the next."""

    depth: int
    """Tokens before it."""
    ids: Sequence[int]
    parent: int | None
    branches: list[int]
    """The sequences that pass through it."""
    children: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Nodes, parents before children; node 0 is the root, whose tokens all sequences share."""

    nodes: Sequence[Node]
    ends: Sequence[int]
    """Of each sequence: the node at whose last token it ends."""

    def spell(self, branch: int) -> list[int]:
        """Return the ids on the path from the root to the end of a sequence."""
        path: list[Node] = []
        place: int | None = self.ends[branch]
        while place is not None:
            path.append(self.nodes[place])
            place = self.nodes[place].parent
        return [token for node in reversed(path) for token in node.ids]


def build_tree(sequences: Sequence[Sequence[int]]) -> PrefixTree:
    """Build the tree. A node ends where its sequences differ, or where one of them ends."""
    nodes: list[Node] = []
    ends = [0] * len(sequences)
    # Without recursion: a chain of prefixes may be as deep as there are sequences.
    ahead: list[tuple[int | None, int, list[int]]] = [(None, 0, list(range(len(sequences))))]
    while ahead:
        parent, depth, branches = ahead.pop()
        stop = _common(sequences, branches, depth)
        ids = list(sequences[branches[0]][depth:stop]) if branches else []
        place = len(nodes)
        nodes.append(Node(depth, ids, parent, branches))
        if parent is not None:
            nodes[parent].children.append(place)
        forks: dict[int, list[int]] = {}
        for branch in branches:
            if len(sequences[branch]) == stop:
                ends[branch] = place
            else:
                forks.setdefault(sequences[branch][stop], []).append(branch)
        ahead += [(place, stop, fork) for fork in reversed(forks.values())]
    return PrefixTree(nodes, ends)


def _common(sequences: Sequence[Sequence[int]], branches: Sequence[int], start: int) -> int:
    """Return the end of the tokens that all these sequences share."""
    if not branches:
        return start
    first = sequences[branches[0]]
    stop = min(len(sequences[branch]) for branch in branches)
    for branch in branches[1:]:
        other = sequences[branch]
        if other[start:stop] != first[start:stop]:
            stop = next(at for at in range(start, stop) if other[at] != first[at])
    return stop
