"""Sequences → micro-batches of similar length under a token budget, the same plan on every rank.

Shape suffixes: b rows, l padded length, t sampled tokens of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from insitu.types import TrainingSequence

_FILLER_IDS = [0, 0]
"""What a rank without work runs so that its collectives still meet the other ranks'."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass. Rows are padded on the right: causal attention never looks there, so no mask is
    needed and the engine's fast causal kernel applies."""

    ids_bl: Tensor
    position_t: Tensor
    """Flat index (into B·L) of the hidden state that predicts each sampled token."""
    target_t: Tensor
    old_t: Tensor
    advantage_t: Tensor
    is_filler: bool = False
    """True for work that only keeps ranks in step: it contributes exactly zero."""

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(
            self.ids_bl.to(device),
            self.position_t.to(device),
            self.target_t.to(device),
            self.old_t.to(device),
            self.advantage_t.to(device),
            self.is_filler,
        )


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


def collate(sequences: Sequence[TrainingSequence]) -> MicroBatch:
    """Pad the rows and gather what belongs to their sampled tokens; no rows give a filler."""
    if not sequences:
        return score_batch([_FILLER_IDS], is_filler=True)
    ids_bl = _pad([sequence.token_ids for sequence in sequences])
    positions: list[int] = []
    targets: list[int] = []
    old: list[float] = []
    advantages: list[float] = []
    for row, sequence in enumerate(sequences):
        offset = row * ids_bl.shape[1] - 1
        sampled = [i for i, flag in enumerate(sequence.mask) if flag]
        positions += [offset + i for i in sampled]
        targets += [sequence.token_ids[i] for i in sampled]
        old += [sequence.logprobs[i] for i in sampled]
        advantages += [sequence.advantage] * len(sampled)
    return MicroBatch(
        ids_bl,
        torch.tensor(positions, dtype=torch.long),
        torch.tensor(targets, dtype=torch.long),
        torch.tensor(old, dtype=torch.float32),
        torch.tensor(advantages, dtype=torch.float32),
    )


def score_batch(rows: Sequence[Sequence[int]], is_filler: bool = False) -> MicroBatch:
    """A micro-batch that asks for every token from the second on; old and advantage are zero."""
    ids_bl = _pad(rows)
    width = ids_bl.shape[1]
    positions = [row * width + i - 1 for row, ids in enumerate(rows) for i in range(1, len(ids))]
    targets = [token for ids in rows for token in ids[1:]]
    zeros_t = torch.zeros(len(targets))
    return MicroBatch(ids_bl, torch.tensor(positions), torch.tensor(targets), zeros_t, zeros_t, is_filler)


def _pad(rows: Sequence[Sequence[int]]) -> Tensor:
    width = max(len(ids) for ids in rows)
    return torch.tensor([[*ids, *([0] * (width - len(ids)))] for ids in rows], dtype=torch.long)
