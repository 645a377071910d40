"""Sequences → micro-batches under a token budget, the same plan on every rank.

If the model's attention supports branches, a micro-batch is one row: a forest in which every prefix that
sequences share is computed once (`trie.py`). Otherwise it is a padded batch with one sequence per row.
Either way, log-probabilities and gradients are the same as for each sequence alone.

A sequence is computed up to its last sampled token, exclusive: nothing later is in the loss.

Shape suffixes: b rows, l (padded) length, t sampled tokens of the micro-batch, u their distinct pairs of
(predicting place, predicted token), n sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from insitu.training.objective import Share
from insitu.training.trie import Ints, cut_for_ranks, lay_out, row_lengths, shared_prefixes, sorted_order

Shares = Sequence[Share]

_FILLER_IDS = [0, 0]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass: a forest in one row, or rows padded on the right, invisible to causal attention.

    Rollouts that sampled the same token after the same prefix share a pair u; each keeps its own t.
    """

    ids_bl: Tensor
    predictor_u: Tensor
    """Flat index (into B·L) of the hidden state that predicts the target."""
    target_u: Tensor
    pick_t: Tensor
    """The pair u of each sampled token."""
    sampler_t: Tensor
    """The log-probability that the sampler recorded."""
    constrained_t: Tensor
    """True where a grammar constrained the distribution behind `sampler_t`."""
    advantage_t: Tensor
    weight_t: Tensor
    rollout_t: Tensor
    """The index of the token's rollout within the step."""
    depth_bl: Tensor | None = None
    """The position of each token in its own sequence; None for padded rows."""
    end_bl: Tensor | None = None
    """The end of each token's subtree; None for padded rows."""
    is_filler: bool = False
    """True for a batch that only keeps ranks in lockstep: it contributes exactly zero."""

    def to(self, device: torch.device) -> MicroBatch:
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "is_filler"}
        moved = {name: tensor if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class Part:
    """The sequences of one micro-batch; a filler has none."""

    shares: Shares
    inputs: Sequence[Ints]
    """The tokens to compute, per sequence."""
    shared_n: Ints | None
    """In a forest, the number of leading tokens each shares with the one before; None for padded rows."""


@dataclass(frozen=True, slots=True)
class Packing:
    """A step's sequences dealt over ranks and micro-batches."""

    ranks: list[list[Part]]
    """The micro-batches of each rank, equally many."""
    num_computed_tokens: int
    """Over all ranks, including padding but not fillers."""


def pack(shares: Shares, max_tokens: int, world_size: int, can_branch: bool = True) -> Packing:
    """Deal the sequences so that ranks finish together, with at most `max_tokens` in a micro-batch.

    Rows with branches may be a quarter longer than the longest sequence: that takes little more memory than
    the sequence alone, and long histories are the ones worth sharing. A padded row longer than `max_tokens`
    gets a micro-batch to itself.
    """
    inputs = [_inputs(share) for share in shares]
    deal = _pack_forests if can_branch else _pack_padded
    return deal(shares, inputs, max_tokens, world_size)


def _pack_padded(shares: Shares, inputs: Sequence[Ints], max_tokens: int, world_size: int) -> Packing:
    lengths = [len(ids) for ids in inputs]
    ranks = plan(lengths, max_tokens, world_size)

    def part(batch: Sequence[int]) -> Part:
        return Part([shares[i] for i in batch], [inputs[i] for i in batch], None)

    computed = sum(len(batch) * max(lengths[i] for i in batch) for r in ranks for batch in r if batch)
    return Packing([[part(batch) for batch in r] for r in ranks], computed)


def _pack_forests(shares: Shares, inputs: Sequence[Ints], max_tokens: int, world_size: int) -> Packing:
    order = sorted_order(inputs)
    shares, inputs = [shares[i] for i in order], [inputs[i] for i in order]
    length_n = np.array([len(ids) for ids in inputs], dtype=np.int64)
    shared_n = shared_prefixes(inputs)
    limit = max(max_tokens, int(1.25 * max(length_n, default=0)))
    rows = cut_for_ranks(length_n, shared_n, limit, world_size)
    lengths = row_lengths(length_n, shared_n, rows)
    dealt = _even(_deal(lengths, world_size))

    def part(row: range) -> Part:
        own_n = shared_n[row.start : row.stop].copy()
        own_n[:1] = 0  # the sequence it shares a prefix with is in another row
        return Part(shares[row.start : row.stop], inputs[row.start : row.stop], own_n)

    ranks = [[part(rows[batch[0]] if batch else range(0)) for batch in r] for r in dealt]
    return Packing(ranks, sum(lengths))


def _inputs(share: Share) -> Ints:
    """Return the tokens to compute: all before the last sampled one."""
    mask = share.sequence.mask
    last = len(mask) - 1 - mask[::-1].index(1)
    return np.array(share.sequence.token_ids[:last], dtype=np.int64)


def plan(lengths: Sequence[int], max_tokens: int, world_size: int) -> list[list[list[int]]]:
    """Plan each rank's micro-batches of padded rows, as lists of indices into `lengths`.

    Ranks get nearly the same number of tokens, and the rows of a micro-batch have nearly the same length.
    Rows × longest row stays within `max_tokens`; a longer row gets a micro-batch to itself.
    """
    shares = [[i for row in rows for i in row] for rows in _deal(lengths, world_size)]
    return _even([_split(share, lengths, max_tokens) for share in shares])


def _deal(lengths: Sequence[int], world_size: int) -> list[list[list[int]]]:
    """Deal rows to ranks in a zigzag, longest first, each row a micro-batch."""
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    ranks: list[list[list[int]]] = [[] for _ in range(world_size)]
    for place, index in enumerate(longest_first):
        lap, seat = divmod(place, world_size)
        ranks[seat if lap % 2 == 0 else world_size - 1 - seat].append([index])
    return ranks


def _even(ranks: list[list[list[int]]]) -> list[list[list[int]]]:
    """Pad ranks that have fewer micro-batches with empty ones."""
    most = max(len(batches) for batches in ranks)
    return [batches + [[] for _ in range(most - len(batches))] for batches in ranks]


def _split(longest_first: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    for index in longest_first:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def collate(part: Part) -> MicroBatch:
    """Build the micro-batch of a part."""
    if not part.shares:
        return filler()
    if part.shared_n is None:
        ids_bl = _pad([ids.tolist() for ids in part.inputs])
        width = ids_bl.shape[1]
        paths = [np.arange(len(ids)) + n * width for n, ids in enumerate(part.inputs)]
        return _gather(part.shares, paths, ids_bl)
    forest = lay_out(part.inputs, part.shared_n)
    depth_bl, end_bl = (torch.from_numpy(column)[None] for column in (forest.depth_l, forest.end_l))
    batch = _gather(part.shares, forest.paths, torch.from_numpy(forest.ids_l)[None])
    return replace(batch, depth_bl=depth_bl, end_bl=end_bl)


def filler() -> MicroBatch:
    """Build the batch that a rank without work runs, so that its collectives match the other ranks'."""
    return score_batch([_FILLER_IDS], is_filler=True)


def _gather(shares: Shares, paths: Sequence[Ints], ids_bl: Tensor) -> MicroBatch:
    """Gather the columns per sampled token; `paths` has the flat places of each sequence's tokens."""
    sampled = [np.flatnonzero(share.sequence.mask) for share in shares]
    places_t = np.concatenate([path[at - 1] for path, at in zip(paths, sampled, strict=True)])
    targets_t = _sampled([share.sequence.token_ids for share in shares], sampled, np.int64)
    pairs_2u, pick_t = np.unique(np.stack([places_t, targets_t]), axis=1, return_inverse=True)
    counts = [len(at) for at in sampled]

    def column(name: str, dtype: type) -> Tensor:
        lists = [getattr(share.sequence, name) for share in shares]
        return torch.from_numpy(_sampled(lists, sampled, dtype))

    return MicroBatch(
        ids_bl,
        torch.from_numpy(pairs_2u[0].astype(np.int64)),
        torch.from_numpy(pairs_2u[1].astype(np.int64)),
        torch.from_numpy(pick_t.reshape(-1)),
        sampler_t=column("logprobs", np.float32),
        constrained_t=column("constrained", np.bool_),
        advantage_t=column("advantages", np.float32),
        weight_t=_repeated([share.weight for share in shares], counts, np.float32),
        rollout_t=_repeated([share.rollout for share in shares], counts, np.int64),
    )


def _sampled(lists: Sequence[Sequence[float]], sampled: Sequence[Ints], dtype: type) -> np.ndarray:
    """Concatenate the lists' values at the sampled tokens of their sequences."""
    taken = [np.asarray(values)[at] for values, at in zip(lists, sampled, strict=True)]
    return np.concatenate(taken).astype(dtype)


def _repeated(values: Sequence[float], counts: Sequence[int], dtype: type) -> Tensor:
    return torch.from_numpy(np.repeat(np.array(values, dtype=dtype), counts))


def score_batch(rows: Sequence[Sequence[int]], is_filler: bool = False) -> MicroBatch:
    """Build a micro-batch that scores every token from the second on; its other columns are zero."""
    ids_bl = _pad(rows)
    width = ids_bl.shape[1]
    positions = [row * width + i - 1 for row, ids in enumerate(rows) for i in range(1, len(ids))]
    targets = [token for ids in rows for token in ids[1:]]
    zeros_t = torch.zeros(len(targets))
    return MicroBatch(
        ids_bl,
        torch.tensor(positions),
        torch.tensor(targets),
        torch.arange(len(targets)),
        sampler_t=zeros_t,
        constrained_t=zeros_t.bool(),
        advantage_t=zeros_t,
        weight_t=zeros_t,
        rollout_t=torch.zeros(len(targets), dtype=torch.long),
        is_filler=is_filler,
    )


def _pad(rows: Sequence[Sequence[int]]) -> Tensor:
    width = max(len(ids) for ids in rows)
    return torch.tensor([[*ids, *([0] * (width - len(ids)))] for ids in rows], dtype=torch.long)
