"""The tree spells every sequence exactly, and forks only where sequences differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from insitu.view.answers.prefix_tree import build_tree
from insitu.view.answers.sequences import sequences_of

FEW_TOKENS = st.lists(st.integers(0, 2), max_size=8)
"""Few different ids: prefixes are shared often."""


@given(st.lists(FEW_TOKENS, min_size=1, max_size=8))
def test_every_leaf_spells_its_sequence(sequences: list[list[int]]) -> None:
    tree = build_tree(sequences)
    assert [tree.spell(branch) for branch in range(len(sequences))] == sequences


@given(st.lists(FEW_TOKENS, min_size=1, max_size=8))
def test_a_fork_is_the_first_differing_token(sequences: list[list[int]]) -> None:
    tree = build_tree(sequences)
    for place, node in enumerate(tree.nodes):
        assert node.depth == (
            0 if node.parent is None else tree.nodes[node.parent].depth + len(tree.nodes[node.parent].ids)
        )
        assert node.ids or place == 0, "only the root may be empty"
        firsts = [tree.nodes[child].ids[0] for child in node.children]
        assert len(set(firsts)) == len(firsts)
        ending = [branch for branch in node.branches if tree.ends[branch] == place]
        passing = [branch for child in node.children for branch in tree.nodes[child].branches]
        assert sorted(ending + passing) == sorted(node.branches)
        # A node with one child ends there because one of its sequences does.
        assert len(node.children) != 1 or ending


@given(st.lists(FEW_TOKENS, min_size=1, max_size=6), st.data())
def test_equal_sequences_share_one_end(sequences: list[list[int]], data: st.DataObject) -> None:
    copied = [*sequences, data.draw(st.sampled_from(sequences))]
    tree = build_tree(copied)
    assert tree.ends[-1] == tree.ends[copied.index(copied[-1])]


def test_a_chain_of_prefixes_is_as_deep_as_it_is_long() -> None:
    sequences = [list(range(length)) for length in range(400)]
    tree = build_tree(sequences)
    assert len(tree.nodes) == 400
    assert tree.spell(399) == sequences[-1]


def call(name: str, prompt: Sequence[int], output: Sequence[int]) -> Any:
    return {
        "id": name,
        "prompt_ids": list(prompt),
        "output_ids": list(output),
        "logprobs": [-1.0] * len(output),
    }


def test_calls_that_extend_one_another_are_one_sequence() -> None:
    made = sequences_of([call("a", [1, 2], [3]), call("b", [1, 2, 3, 4], [5, 6])])
    assert [each.ids for each in made] == [[1, 2, 3, 4, 5, 6]]
    assert [(each.length, each.call_id) for each in made[0].stretches] == [
        (2, None),
        (1, "a"),
        (1, None),
        (2, "b"),
    ]


def test_a_call_that_starts_afresh_is_another_sequence() -> None:
    made = sequences_of([call("a", [1, 2], [3]), call("b", [1, 9], [5]), call("c", [1, 2, 3], [7])])
    assert [each.ids for each in made] == [[1, 2, 3, 7], [1, 9, 5]]
    assert [each.call_ids for each in made] == [["a", "c"], ["b"]]


def test_calls_without_tokens_are_left_out() -> None:
    untold: Any = {"id": "a"}
    assert sequences_of([untold, call("b", [], [1])])[0].ids == [1]
