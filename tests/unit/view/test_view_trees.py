"""The group page: a tree of recorded ids, with rewards, advantages and reasons that equal the trainer's."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest

from insitu.errors import NotFound
from insitu.view.answers.groups import group_page, group_view
from insitu.view.answers.one_rollout import rollout_view
from insitu.view.answers.stored import find_rollout
from insitu.view.answers.trees import tree_view
from insitu.view.reading.query import Filters
from insitu.wire.views.groups import TreeView


def all_groups(viewed: Any) -> list[Any]:
    return list(group_page(viewed, Filters(), "oldest", None, 200).groups)


def spelled(tree: TreeView, branch: int) -> list[int]:
    place: int | None = tree.branches[branch].node
    ids: list[int] = []
    while place is not None:
        ids = [*tree.nodes[place].ids, *ids]
        place = tree.nodes[place].parent
    return ids


def test_every_branch_spells_the_recorded_tokens_of_its_sibling(viewed):
    """The last call of a rollout holds everything before it, in the records' own words."""
    groups = all_groups(viewed)
    assert len(groups) == 3 * 6 + 3 * 6
    num_forks = 0
    for group in groups:
        tree = group_view(viewed, group.store, group.index, 64).tree
        num_forks += len(tree.nodes) > 1
        recorded = {}
        for place, sibling in enumerate(tree.siblings):
            calls = find_rollout(viewed, sibling.rollout_id).rollout.read_calls()
            if calls:
                recorded[place] = [*calls[-1]["prompt_ids"], *calls[-1]["output_ids"]]
        assert {each.sibling: spelled(tree, at) for at, each in enumerate(tree.branches)} == recorded
        assert [each.num_tokens for each in tree.branches] == [len(ids) for ids in recorded.values()]
        failed = [each.rollout_id for at, each in enumerate(tree.siblings) if at not in recorded]
        assert tree.without_tokens == failed
    assert num_forks > 5


def test_spans_sum_the_advantages_of_the_siblings_that_learn_from_them(viewed):
    num_sampled = 0
    for group in all_groups(viewed):
        tree = group_view(viewed, group.store, group.index, 64).tree
        for node in tree.nodes:
            assert sum(span.length for span in node.spans) == len(node.ids)
            assert node.texts is not None
            assert len(node.texts) == len(node.ids)
            for span in node.spans:
                num_sampled += span.num_sampled
                assert span.num_trained <= span.num_sampled <= len(node.branches)
                assert (span.logprobs is None) == (span.kind == "context")
                assert span.logprobs is None or len(span.logprobs) == span.length
                assert (span.advantage_sum is not None) == (span.num_trained > 0)
        # In one-turn rollouts a leaf's own tokens carry its own advantage.
        for branch in tree.branches:
            row, node = tree.siblings[branch.sibling], tree.nodes[branch.node]
            if (
                len(branch.call_ids) == 1
                and node.branches == [tree.branches.index(branch)]
                and node.parent is not None
            ):
                expected = row.advantage if row.fate == "trained" else None
                assert node.spans[-1].advantage_sum == expected
                assert node.spans[-1].reasons == ([row.reason] if row.fate == "dropped" else [])
    assert num_sampled > 100


def test_the_root_is_the_shared_prompt(viewed):
    group = next(each for each in all_groups(viewed) if each.num_trained == 4)
    view = group_view(viewed, group.store, group.index, 64)
    tree = view.tree
    first = find_rollout(viewed, tree.siblings[0].rollout_id).rollout.read_calls()[0]
    assert tree.num_prompt_tokens == len(first["prompt_ids"])
    assert tree.nodes[0].ids[: tree.num_prompt_tokens] == first["prompt_ids"]
    assert tree.prompt == first.get("messages")
    assert tree.basis == "trainer_function"
    rewards = [each.reward for each in tree.siblings if each.reward is not None]
    assert view.reward == pytest.approx(math.fsum(rewards) / len(rewards))


def test_the_same_example_over_the_steps(viewed):
    group = all_groups(viewed)[8]
    assert group.store.startswith("epoch-")
    view = group_view(viewed, group.store, group.index, 64)
    assert len(view.steps) == 3, "one for each epoch"
    assert [step.epoch for step in view.steps] == [0, 1, 2]
    assert {step.num_rollouts for step in view.steps} == {4}
    for step in view.steps:
        other = group_view(viewed, step.store, step.index, 64)
        assert other.example_id == view.example_id
        assert (other.reward, sum(each.fate == "trained" for each in other.tree.siblings)) == (
            pytest.approx(step.reward),
            step.num_trained,
        )


def test_any_rollouts_make_a_tree(viewed):
    """Two steps of one example, aligned at the first difference."""
    group = all_groups(viewed)[8]
    first, *_, last = group_view(viewed, group.store, group.index, 64).steps
    chosen = [
        find_rollout(viewed, group_view(viewed, step.store, step.index, 64).tree.siblings[0].rollout_id)
        for step in (first, last)
    ]
    tree = tree_view(viewed, chosen)
    assert [each.store for each in tree.siblings] == [first.store, last.store]
    steps = {step for node in tree.nodes for span in node.spans for step in span.policy_steps}
    assert len(steps) == 2


def test_fewer_siblings_than_there_are(viewed):
    group = next(each for each in all_groups(viewed) if each.num_rollouts == 4)
    view = group_view(viewed, group.store, group.index, 3)
    assert len(view.tree.siblings) == 3
    assert view.num_left_out == 1


def test_a_group_that_is_not_there(viewed):
    with pytest.raises(NotFound, match="no rollouts of example 99 in epoch-0000-step-0000"):
        group_view(viewed, "epoch-0000-step-0000", 99, 16)


def test_a_rollout_in_full(viewed, finished_run):
    """Everything that the stored line has, and the tokens of every call."""
    for store in ("epoch-0000-step-0000", "validation-0000"):
        for raw in (finished_run / "trajectories" / f"{store}.jsonl").read_bytes().splitlines():
            line = orjson.loads(raw)
            view = rollout_view(viewed, line["rollout_id"])
            assert (view.input, view.expected, view.output) == (
                line["input"],
                line["expected"],
                line["output"],
            )
            assert [call.id for call in view.calls] == [call["id"] for call in line["calls"]]
            recorded = find_rollout(viewed, line["rollout_id"]).rollout.read_calls()
            whole: dict[str, list[int]] = {}
            for call, full in zip(view.calls, recorded, strict=True):
                assert call.prompt is not None
                assert call.output is not None
                shared = whole.get(call.parent_id or "", [])[: call.shared_tokens]
                assert [*shared, *call.prompt.ids] == full["prompt_ids"]
                assert (call.output.ids, call.output.logprobs) == (full["output_ids"], full["logprobs"])
                assert "".join(call.output.texts or []) == full["answer"]["content"]
                assert call.policy_step == full["policy_step"]
                whole[call.id] = [*full["prompt_ids"], *full["output_ids"]]
                assert (call.fate, call.reason) == (view.row.fate, view.row.reason)
            assert line["rollout_id"] in [sibling.rollout_id for sibling in view.siblings]


def test_a_rollout_that_failed_shows_its_traceback(viewed):
    from insitu.view.answers.rollouts import rollouts_view

    (row,) = rollouts_view(viewed, Filters(ending="tool_error", epoch=0), "oldest", None, 9).rollouts
    view = rollout_view(viewed, row.rollout_id)
    assert view.traceback is not None
    assert "the calculator is not plugged in" in view.traceback.error
    assert (view.row.fate, view.row.reason) == ("dropped", "failed")
    assert view.tokens_problem == "no model call of it is on record"


def test_lost_tokens_are_named_and_the_rest_is_shown(run_copy, tmp_path):
    from insitu.view.run import ViewedRun

    run = ViewedRun("run", run_copy, index=tmp_path / "index.db")
    while not run.index.refresh():
        pass
    (run_copy / "trajectories" / "epoch-0000-step-0001.tokens").unlink()
    row = run.index.read(
        lambda db: db.execute(
            "SELECT rollout_id FROM rollouts r JOIN stores s ON s.id = r.store WHERE s.name = ?",
            ("epoch-0000-step-0001",),
        ).fetchone()
    )
    view = rollout_view(run, row[0])
    assert "is missing with the whole file" in view.tokens_problem
    assert view.calls[0].output is None
    assert view.calls[0].messages
    run.close()
