"""Trees: rollouts as a prefix tree, with the part that each token has in training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from insitu.errors import InvalidRequest, TooLarge
from insitu.harness.files.trained_tokens import TrainedCall
from insitu.json_values import JsonObject
from insitu.view.answers.one_rollout import CallFates, run_basis
from insitu.view.answers.prefix_tree import Node, PrefixTree, build_tree
from insitu.view.answers.sequences import Stretch, TokenPath, sequences_of, shown_calls
from insitu.view.answers.stored import StoredRollout, judged_group, trained_calls
from insitu.view.reading.fates import Judged
from insitu.view.run import ViewedRun
from insitu.wire.views.groups import Branch, TreeNode, TreeSpan, TreeView

_MAX_TOKENS = 2_000_000
"""Tokens of all branches together."""


@dataclass(frozen=True, slots=True)
class _Use:
    """A sibling's use of a stretch of tokens."""

    trained: bool
    advantage: float | None
    reason: str | None
    policy_step: int
    trainer: Sequence[float] = ()
    """The trainer's log-probability of each token; empty if it is not kept."""


@dataclass(frozen=True, slots=True)
class _Path:
    """A branch: one sequence of one sibling, and its use of each stretch."""

    sibling: int
    number: int
    tokens: TokenPath
    uses: Sequence[_Use | None]
    """None for tokens that were read."""


def tree_view(run: ViewedRun, rollouts: Sequence[StoredRollout]) -> TreeView:
    """Return these rollouts as one tree."""
    if not rollouts:
        raise InvalidRequest("a tree needs at least one rollout")
    groups = {(each.row.store, each.row.index) for each in rollouts}
    judged: dict[str, Judged] = {}
    trained: dict[str, TrainedCall] = {}
    for store, index in groups:
        judged |= judged_group(run, store, index)
        trained |= trained_calls(run, store, index)
    paths: list[_Path] = []
    prompt: list[JsonObject] = []
    for sibling, each in enumerate(rollouts):
        made, messages = _paths(sibling, each, judged.get(each.row.rollout_id), trained)
        paths += made
        prompt = prompt or messages
    if (total := sum(len(path.tokens.ids) for path in paths)) > _MAX_TOKENS:
        raise TooLarge(
            f"these {len(rollouts)} rollouts have {total:,} tokens, more than the {_MAX_TOKENS:,} of a tree",
            hint="ask for fewer of them with limit, or look at single rollouts",
        )
    tree = build_tree([path.tokens.ids for path in paths])
    with_tokens = {path.sibling for path in paths}
    found = [judged.get(each.row.rollout_id) for each in rollouts]
    of_calls = [None if each is None else each.advantages for each in found]
    return TreeView(
        siblings=[each.row for each in rollouts],
        advantages=[None if each is None else list(each) for each in of_calls],
        nodes=[_node(run, place, node, paths) for place, node in enumerate(tree.nodes)],
        branches=_branches(paths, tree),
        num_prompt_tokens=_shared_prompt(paths, tree),
        prompt=prompt,
        basis=run_basis(run, rollouts[0].row),
        without_tokens=[
            each.row.rollout_id for place, each in enumerate(rollouts) if place not in with_tokens
        ],
    )


def _paths(
    sibling: int, found: StoredRollout, judged: Judged | None, trained: Mapping[str, TrainedCall]
) -> tuple[list[_Path], list[JsonObject]]:
    details, _ = found.details()
    fates = CallFates(found.row, found.rollout, details, judged)
    calls = shown_calls(details, found.rollout)
    steps = {call["id"]: call["policy_step"] for call in calls}

    def use(stretch: Stretch) -> _Use | None:
        if stretch.call_id is None:
            return None
        fate, reason, advantage = fates.of(stretch.call_id)
        own = trained.get(stretch.call_id)
        is_whole = own is not None and len(own.logprobs) == stretch.length
        trainer: list[float] = own.logprobs.tolist() if own is not None and is_whole else []
        return _Use(fate == "trained", advantage, reason, steps[stretch.call_id], trainer)

    made = [
        _Path(sibling, number, tokens, [use(stretch) for stretch in tokens.stretches])
        for number, tokens in enumerate(sequences_of(calls))
    ]
    return made, (calls[0].get("messages") or [] if calls else [])


def _branches(paths: Sequence[_Path], tree: PrefixTree) -> list[Branch]:
    return [
        Branch(path.sibling, path.number, end, len(path.tokens.ids), path.tokens.call_ids)
        for path, end in zip(paths, tree.ends, strict=True)
    ]


def _shared_prompt(paths: Sequence[_Path], tree: PrefixTree) -> int:
    read = [path.tokens.stretches[0].length for path in paths if path.tokens.stretches[0].call_id is None]
    return min([*read, len(tree.nodes[0].ids)]) if len(read) == len(paths) else 0


def _node(run: ViewedRun, place: int, node: Node, paths: Sequence[_Path]) -> TreeNode:
    return TreeNode(
        id=place,
        parent=node.parent,
        children=node.children,
        depth=node.depth,
        ids=list(node.ids),
        texts=run.names.texts(node.ids),
        spans=_spans(node, [paths[branch] for branch in node.branches]),
        branches=node.branches,
    )


def _spans(node: Node, paths: Sequence[_Path]) -> list[TreeSpan]:
    """Cut the node where the use of its tokens changes for one of the siblings."""
    start, stop = node.depth, node.depth + len(node.ids)
    cuts = {start, stop}
    for path in paths:
        at = 0
        for stretch in path.tokens.stretches:
            at += stretch.length
            if start < at < stop:
                cuts.add(at)
    edges = sorted(cuts)
    return [_span(paths, begin, end) for begin, end in pairwise(edges)]


def _span(paths: Sequence[_Path], begin: int, end: int) -> TreeSpan:
    sampled: list[tuple[_Use, Sequence[float]]] = []
    trainers: list[Sequence[float]] = []
    for path in paths:
        at = 0
        for stretch, use in zip(path.tokens.stretches, path.uses, strict=True):
            if at <= begin < at + stretch.length:
                if use is not None:
                    sampled.append((use, stretch.logprobs[begin - at : end - at]))
                    trainers.append(use.trainer[begin - at : end - at])
                break
            at += stretch.length
    trained = [use for use, _ in sampled if use.trained]
    known = [use.advantage for use in trained if use.advantage is not None]
    logprobs = [each for _, each in sampled if len(each) == end - begin]
    trainers = [each for each in trainers if len(each) == end - begin]
    return TreeSpan(
        length=end - begin,
        kind="sampled" if sampled else "context",
        num_sampled=len(sampled),
        num_trained=len(trained),
        advantage_sum=math.fsum(known) if known else None,
        reasons=sorted({use.reason for use, _ in sampled if not use.trained and use.reason}),
        policy_steps=sorted({use.policy_step for use, _ in sampled}),
        logprobs=_means(logprobs) if logprobs else None,
        trainer_logprobs=_means(trainers) if trainers else None,
    )


def _means(columns: Sequence[Sequence[float]]) -> list[float]:
    return [math.fsum(values) / len(values) for values in zip(*columns, strict=True)]
