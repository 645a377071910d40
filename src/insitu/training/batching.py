"""Sequences → rows → micro-batches of similar length under a token budget, the same plan on every rank.

Rollouts of one example start with the same prompt. A row computes it once and hangs the rollouts on it as
branches: each branch sees the prompt and itself, at the positions it had alone, so every log-probability
and gradient is that of separate rows, for a fraction of the tokens::

    three rows     p p p p a a      one row     p p p p a a b b b c      positions 0 1 2 3 4 5 4 5 6 4
                   p p p p b b b
                   p p p p c

Shape suffixes: b rows, l padded length, t sampled tokens of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from insitu.training.shares import Share
from insitu.types import TrainingSequence

_FILLER_IDS = [0, 0]
"""What a rank without work runs so that its collectives still meet the other ranks'."""


_MAX_SHARED_TOKENS = 2048
"""A row with branches needs a mask of its length squared, so it stays short; a lone sequence needs none."""


@dataclass(frozen=True, slots=True)
class Row:
    """Sequences that start with the same `num_shared` tokens."""

    num_shared: int
    shares: list[Share]

    @property
    def length(self) -> int:
        return self.num_shared + sum(len(s.sequence.token_ids) - self.num_shared for s in self.shares)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass. Rows are padded on the right: causal attention never looks there, so without
    branches no mask is needed and the fast causal kernel applies."""

    ids_bl: Tensor
    position_t: Tensor
    """Flat index (into B·L) of the hidden state that predicts each sampled token."""
    target_t: Tensor
    sampler_t: Tensor
    """The log-probability that the sampler recorded."""
    advantage_t: Tensor
    weight_t: Tensor
    rollout_t: Tensor
    """The number of the token's rollout within the step."""
    branch_bl: Tensor | None = None
    """0 for a shared prompt, 1, 2, … for its branches, -1 for padding; None when no row has branches."""
    offset_bl: Tensor | None = None
    """The position of each token in its own sequence; None as above."""
    is_filler: bool = False
    """True for work that only keeps ranks in step: it contributes exactly zero."""

    def to(self, device: torch.device) -> MicroBatch:
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "is_filler"}
        moved = {name: tensor if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
        return replace(self, **moved)

    def visible_bll(self) -> Tensor | None:
        """Which token (last axis) each token sees: itself, earlier ones of its branch, and the prompt."""
        if self.branch_bl is None:
            return None
        query, key = self.branch_bl[:, :, None], self.branch_bl[:, None, :]
        return ((query == key) | (key == 0)).tril()


def share_prompts(shares: Sequence[Share], max_tokens: int) -> list[Row]:
    """Put sequences with the same prompt (all tokens before the first sampled one) on common rows.

    A row of several sequences has at most `max_tokens`, and at most what its mask allows.
    """
    limit = min(max_tokens, _MAX_SHARED_TOKENS)
    families: dict[tuple[int, ...], list[Share]] = {}
    for share in shares:
        prompt = share.sequence.token_ids[: _num_prompt(share.sequence)]
        families.setdefault(tuple(prompt), []).append(share)
    return [row for prompt, members in families.items() for row in _rows(len(prompt), members, limit)]


def separate(shares: Sequence[Share]) -> list[Row]:
    """One row per sequence, for models whose attention cannot be given branches."""
    return [Row(_num_prompt(share.sequence), [share]) for share in shares]


def _num_prompt(sequence: TrainingSequence) -> int:
    return next((i for i, flag in enumerate(sequence.mask) if flag), len(sequence.token_ids))


def _rows(num_shared: int, members: Sequence[Share], limit: int) -> list[Row]:
    rows: list[Row] = []
    room = 0
    for share in members:
        num_own = len(share.sequence.token_ids) - num_shared
        # a short prompt under long branches saves little and makes attention work harder
        if rows and num_own <= room and num_own <= 4 * num_shared:
            rows[-1].shares.append(share)
            room -= num_own
        else:
            rows.append(Row(num_shared, [share]))
            room = limit - len(share.sequence.token_ids)
    return rows


def plan(lengths: Sequence[int], max_tokens: int, world_size: int) -> list[list[list[int]]]:
    """For each rank its micro-batches, as lists of indices into `lengths`.

    Sorted by length and dealt back and forth, so that ranks carry nearly the same tokens and rows of one
    micro-batch nearly the same length. Rows × longest row stays within `max_tokens`; a sequence that is
    longer on its own gets a micro-batch to itself. Ranks with fewer micro-batches get empty ones.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    shares: list[list[int]] = [[] for _ in range(world_size)]
    for place, index in enumerate(longest_first):
        lap, seat = divmod(place, world_size)
        shares[seat if lap % 2 == 0 else world_size - 1 - seat].append(index)
    batches = [_split(share, lengths, max_tokens) for share in shares]
    most = max((len(rank_batches) for rank_batches in batches), default=0)
    return [rank_batches + [[] for _ in range(most - len(rank_batches))] for rank_batches in batches]


def _split(longest_first: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    for index in longest_first:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def collate(rows: Sequence[Row]) -> MicroBatch:
    """Pad the rows and gather what belongs to their sampled tokens; no rows give a filler."""
    if not rows:
        return score_batch([_FILLER_IDS], is_filler=True)
    width = max(row.length for row in rows)
    ids: list[list[int]] = []
    branches: list[list[int]] = []
    offsets: list[list[int]] = []
    positions: list[int] = []
    for number, row in enumerate(rows):
        shared = row.num_shared
        ids.append(row.shares[0].sequence.token_ids[:shared])
        branches.append([0] * shared)
        offsets.append(list(range(shared)))
        for branch, s in enumerate((share.sequence for share in row.shares), start=1):
            # where the token before i is: in the prompt for the first of a branch, else right before it
            start = number * width + len(ids[-1]) - shared - 1
            positions += [
                number * width + i - 1 if i == shared else start + i for i, flag in enumerate(s.mask) if flag
            ]
            ids[-1] += s.token_ids[shared:]
            branches[-1] += [branch] * (len(s.token_ids) - shared)
            offsets[-1] += range(shared, len(s.token_ids))
    shares = [share for row in rows for share in row.shares]
    has_branches = len(shares) > len(rows)
    return MicroBatch(
        _pad(ids),
        torch.tensor(positions, dtype=torch.long),
        torch.tensor(_sampled(shares, lambda s: s.sequence.token_ids), dtype=torch.long),
        torch.tensor(_sampled(shares, lambda s: s.sequence.logprobs), dtype=torch.float32),
        torch.tensor(_sampled(shares, lambda s: repeat(s.sequence.advantage)), dtype=torch.float32),
        torch.tensor(_sampled(shares, lambda s: repeat(s.weight)), dtype=torch.float32),
        torch.tensor(_sampled(shares, lambda s: repeat(s.rollout)), dtype=torch.long),
        _pad(branches, -1) if has_branches else None,
        _pad(offsets) if has_branches else None,
    )


def _sampled(shares: Sequence[Share], values: Callable[[Share], Iterable[Any]]) -> list[Any]:
    """What `values` gives for each sampled token, in sequence order."""
    return [
        value
        for share in shares
        for value, flag in zip(values(share), share.sequence.mask, strict=False)
        if flag
    ]


def score_batch(rows: Sequence[Sequence[int]], is_filler: bool = False) -> MicroBatch:
    """A micro-batch that asks for every token from the second on; nothing else about them is known."""
    ids_bl = _pad(rows)
    width = ids_bl.shape[1]
    positions = [row * width + i - 1 for row, ids in enumerate(rows) for i in range(1, len(ids))]
    targets = [token for ids in rows for token in ids[1:]]
    zeros_t = torch.zeros(len(targets))
    return MicroBatch(
        ids_bl,
        torch.tensor(positions),
        torch.tensor(targets),
        sampler_t=zeros_t,
        advantage_t=zeros_t,
        weight_t=zeros_t,
        rollout_t=torch.zeros(len(targets), dtype=torch.long),
        is_filler=is_filler,
    )


def _pad(rows: Sequence[Sequence[int]], value: int = 0) -> Tensor:
    width = max(len(ids) for ids in rows)
    return torch.tensor([[*ids, *([value] * (width - len(ids)))] for ids in rows], dtype=torch.long)
