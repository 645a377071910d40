"""The columns of a micro-batch → the tensors of one forward pass.

Shape suffixes: b rows, l (padded) length, t sampled tokens of the micro-batch, u their distinct triples of
(predicting place, predicted token, temperature), n sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from insitu.training.packing import CONSTRAINED, SAMPLED, STALE, Columns, Part
from insitu.training.trie import Ints, lay_out

_FILLER_IDS = [0, 0]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass: a forest in one row, or rows padded on the right, invisible to causal attention.

    Rollouts that sampled the same token at one temperature after the same prefix share a pair u; each keeps
    its own t.
    """

    ids_bl: Tensor
    predictor_u: Tensor
    """Flat index (into B·L) of the hidden state that predicts the target."""
    target_u: Tensor
    pick_t: Tensor
    """The pair u of each sampled token."""
    sampler_t: Tensor
    """The log-probability that the sampler recorded."""
    stale_t: Tensor
    """True where earlier weights than those in training had sampled the token."""
    constrained_t: Tensor
    """True where more than the temperature changed the distribution behind `sampler_t`."""
    advantage_t: Tensor
    weight_t: Tensor
    rollout_t: Tensor
    """The index of the token's rollout within the step."""
    temperature_u: Tensor | None = None
    """The temperature that the target was sampled at; None if all are 1."""
    depth_bl: Tensor | None = None
    """The position of each token in its own sequence; None for padded rows."""
    end_bl: Tensor | None = None
    """The end of each token's subtree; None for padded rows."""
    teacher_t: Tensor | None = None
    """The log-probability that a teacher gave; None without one, or if the trainer scores it itself."""
    is_filler: bool = False
    """True for a batch that only keeps ranks in lockstep: it contributes exactly zero."""

    def to(self, device: torch.device) -> MicroBatch:
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "is_filler"}
        moved = {name: tensor if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
        return replace(self, **moved)


def collate(part: Part) -> MicroBatch:
    """Build the micro-batch of a part."""
    columns = part.columns
    if not len(columns.length_n):
        return filler()
    ends = np.cumsum(columns.length_n)
    ids = columns.ids_l.astype(np.int64)
    # The last token of each sequence is predicted, not computed.
    inputs = [ids[end - length : end - 1] for end, length in zip(ends, columns.length_n, strict=True)]
    if not part.is_forest:
        ids_bl = _pad(inputs)
        width = ids_bl.shape[1]
        paths = [np.arange(len(own)) + n * width for n, own in enumerate(inputs)]
        return _gather(columns, ids, paths, ids_bl)
    forest = lay_out(inputs, columns.shared_n.astype(np.int64))
    depth_bl, end_bl = (torch.from_numpy(column)[None] for column in (forest.depth_l, forest.end_l))
    batch = _gather(columns, ids, forest.paths, torch.from_numpy(forest.ids_l)[None])
    return replace(batch, depth_bl=depth_bl, end_bl=end_bl)


def filler() -> MicroBatch:
    """Build the batch that a rank without work runs, so that its collectives match the other ranks'."""
    return score_batch([_FILLER_IDS], is_filler=True)


def _gather(columns: Columns, ids: Ints, paths: Sequence[Ints], ids_bl: Tensor) -> MicroBatch:
    """Gather the columns per sampled token; `paths` has the flat places of each sequence's inputs."""
    at_t = np.flatnonzero(columns.flags_l & SAMPLED)
    sequence_t = np.repeat(np.arange(len(columns.sampled_n)), columns.sampled_n)
    # A path has no place for the last token of its sequence, so it is one shorter for every one before.
    places_t = np.concatenate(paths)[at_t - 1 - sequence_t]
    advantage_t, temperature_t = (
        column_s.repeat(columns.sampled_s) for column_s in (columns.advantage_s, columns.temperature_s)
    )
    pairs, pick_t = _distinct(places_t, ids[at_t], temperature_t)
    constrained_t = (columns.flags_l[at_t] & CONSTRAINED).astype(np.bool_)
    return MicroBatch(
        ids_bl,
        torch.from_numpy(pairs.places_u),
        torch.from_numpy(pairs.targets_u),
        torch.from_numpy(pick_t),
        sampler_t=torch.from_numpy(columns.sampler_t.copy()),
        stale_t=torch.from_numpy((columns.flags_l[at_t] & STALE).astype(np.bool_)),
        constrained_t=torch.from_numpy(constrained_t),
        advantage_t=torch.from_numpy(advantage_t),
        weight_t=torch.from_numpy(np.repeat(columns.weight_n, columns.sampled_n)),
        rollout_t=torch.from_numpy(np.repeat(columns.rollout_n, columns.sampled_n).astype(np.int64)),
        temperature_u=None if (columns.temperature_s == 1).all() else torch.from_numpy(pairs.temperatures_u),
        teacher_t=None if columns.teacher_t is None else torch.from_numpy(columns.teacher_t.copy()),
    )


@dataclass(frozen=True, slots=True)
class _Distinct:
    """The distinct triples, in the order of their places."""

    places_u: Ints
    targets_u: Ints
    temperatures_u: NDArray[np.float32]


def _distinct(places_t: Ints, targets_t: Ints, temperature_t: NDArray[np.float32]) -> tuple[_Distinct, Ints]:
    """Return the distinct triples and the one that each token is."""
    values, which_t = np.unique(temperature_t, return_inverse=True)
    num_targets, num_values = int(targets_t.max()) + 1, len(values)
    keys_t = (places_t * num_targets + targets_t) * num_values + which_t
    keys_u, pick_t = np.unique(keys_t, return_inverse=True)
    pairs_u, which_u = np.divmod(keys_u, num_values)
    places_u, targets_u = np.divmod(pairs_u, num_targets)
    return _Distinct(places_u, targets_u, values[which_u]), pick_t


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
        stale_t=zeros_t.bool(),
        constrained_t=zeros_t.bool(),
        advantage_t=zeros_t,
        weight_t=zeros_t,
        rollout_t=torch.zeros(len(targets), dtype=torch.long),
        is_filler=is_filler,
    )


def _pad(rows: Sequence[Sequence[int] | Ints]) -> Tensor:
    padded_bl = np.zeros((len(rows), max(len(ids) for ids in rows)), np.int64)
    for row, ids in zip(padded_bl, rows, strict=True):
        row[: len(ids)] = ids
    return torch.from_numpy(padded_bl)
