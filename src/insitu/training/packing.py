"""Sequences → micro-batches under a token budget, planned once for all ranks; one message per rank.

If the model's attention supports branches, a micro-batch is one row: a forest in which every prefix that
sequences share is computed once (`trie.py`). Otherwise it is a padded batch with one sequence per row.
Either way, log-probabilities and gradients are the same as for each sequence alone.

A sequence is computed up to its last sampled token, exclusive: nothing later is in the loss, and nothing
later is sent. A rank receives its own micro-batches only, as columns: 5 bytes for each token and 12 more for
each sampled one. `batching.py` makes tensors of them.

Shape suffixes: l tokens of all sequences one after the other, t the sampled ones among them, n sequences,
p micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from insitu.training.objective import Share, objective_of, shares_of
from insitu.training.sequences import check_sequence
from insitu.training.trie import Ints, cut_for_ranks, row_lengths, shared_prefixes, sorted_order
from insitu.types import StepSettings, TrainingSequence

Shares = Sequence[Share]

SAMPLED, CONSTRAINED = np.uint8(1), np.uint8(2)
"""Flags of a token: it is in the loss; more than the temperature changed its distribution."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the base model and of the trainer's devices."""

    vocabulary_size: int
    max_length: int | None
    """None if the model's configuration names none."""
    max_micro_batch_tokens: int
    can_branch: bool


@dataclass(frozen=True, slots=True)
class Counts:
    """Sizes of a step, over all ranks."""

    num_tokens: int
    """In the loss."""
    num_sequences: int
    num_input_tokens: int
    num_computed_tokens: int
    """Including padding but not fillers."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Sequences up to their last sampled token, one after the other."""

    ids_l: NDArray[np.int32]
    flags_l: NDArray[np.uint8]
    sampler_t: NDArray[np.float32]
    """The log-probability that the sampler recorded."""
    advantage_t: NDArray[np.float32]
    temperature_t: NDArray[np.float32]
    length_n: NDArray[np.int32]
    sampled_n: NDArray[np.int32]
    shared_n: NDArray[np.int32]
    """In a forest, the number of leading tokens each shares with the one before; 0 in padded rows."""
    rollout_n: NDArray[np.int32]
    """The index of its rollout within the step."""
    weight_n: NDArray[np.float32]
    """Per sampled token."""

    def part(self, tokens: slice, sampled: slice, sequences: slice) -> Columns:
        """Return views of a stretch of the sequences."""
        along = {"l": tokens, "t": sampled, "n": sequences}
        return Columns(*(getattr(self, f.name)[along[f.name[-1]]] for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Part:
    """One micro-batch; a filler has no sequences."""

    columns: Columns
    is_forest: bool


@dataclass(frozen=True, slots=True)
class RankBatch:
    """One rank's micro-batches of a step: all that is sent to it."""

    columns: Columns
    num_sequences_p: NDArray[np.int32]
    is_forest: bool
    num_rollouts: int
    """Of the whole step."""
    counts: Counts

    def parts(self) -> Iterator[Part]:
        """Yield the micro-batches, as views."""
        columns = self.columns
        token_n, sampled_n = (_starts(column) for column in (columns.length_n, columns.sampled_n))
        bounds = _starts(self.num_sequences_p).tolist()
        for first, last in pairwise(bounds):
            tokens, sampled = slice(token_n[first], token_n[last]), slice(sampled_n[first], sampled_n[last])
            yield Part(columns.part(tokens, sampled, slice(first, last)), self.is_forest)


@dataclass(frozen=True, slots=True)
class Row:
    """The sequences of one micro-batch, as indices into the packing's shares; a filler has none."""

    members: Sequence[int]
    shared_n: Ints | None
    """In a forest, the number of leading tokens each shares with the one before; None for padded rows."""


@dataclass(frozen=True, slots=True)
class Packing:
    """A step's sequences dealt over ranks and micro-batches."""

    shares: Shares
    ranks: list[list[Row]]
    """The micro-batches of each rank, equally many."""
    num_computed_tokens: int

    def counts(self) -> Counts:
        sequences = [share.sequence for share in self.shares]
        return Counts(
            num_tokens=sum(int(sequence.mask.sum()) for sequence in sequences),
            num_sequences=len(sequences),
            num_input_tokens=sum(len(sequence.token_ids) for sequence in sequences),
            num_computed_tokens=self.num_computed_tokens,
        )

    @property
    def num_bytes(self) -> int:
        """The bytes of all ranks' columns."""
        lengths = sum(1 + _last_sampled(share.sequence) for share in self.shares)
        sampled = sum(int(share.sequence.mask.sum()) for share in self.shares)
        return 5 * lengths + 12 * sampled + 20 * len(self.shares)

    def rank_batch(self, rank: int) -> RankBatch:
        """Copy what one rank needs into columns of its own."""
        rows = self.ranks[rank]
        members = [self.shares[i] for row in rows for i in row.members]
        shared = [
            n for row in rows for n in (len(row.members) * [0] if row.shared_n is None else row.shared_n)
        ]
        num_rollouts = 1 + max((share.rollout for share in self.shares), default=0)
        return RankBatch(
            _columns(members, shared),
            np.array([len(row.members) for row in rows], np.int32),
            any(row.shared_n is not None for row in rows),
            num_rollouts,
            self.counts(),
        )


def pack_step(
    sequences: Sequence[TrainingSequence], settings: StepSettings, limits: Limits, world_size: int
) -> Packing:
    """Check the sequences of a step, drop those without a gradient, deal the rest to the ranks."""
    for sequence in sequences:
        check_sequence(sequence, limits.vocabulary_size, limits.max_length)
    shares = shares_of(sequences, objective_of(settings), settings)
    return pack(shares, limits.max_micro_batch_tokens, world_size, limits.can_branch)


def pack(shares: Shares, max_tokens: int, world_size: int, can_branch: bool = True) -> Packing:
    """Deal the sequences so that ranks finish together, with at most `max_tokens` in a micro-batch.

    Rows with branches may be a quarter longer than the longest sequence: that takes little more memory than
    the sequence alone, and long histories are the ones worth sharing. A padded row longer than `max_tokens`
    gets a micro-batch to itself.
    """
    inputs = [share.sequence.token_ids[: _last_sampled(share.sequence)] for share in shares]
    deal = _pack_forests if can_branch else _pack_padded
    return deal(shares, inputs, max_tokens, world_size)


def _pack_padded(shares: Shares, inputs: Sequence[Ints], max_tokens: int, world_size: int) -> Packing:
    lengths = [len(ids) for ids in inputs]
    ranks = plan(lengths, max_tokens, world_size)
    computed = sum(len(batch) * max(lengths[i] for i in batch) for r in ranks for batch in r if batch)
    return Packing(shares, [[Row(batch, None) for batch in r] for r in ranks], computed)


def _pack_forests(shares: Shares, inputs: Sequence[Ints], max_tokens: int, world_size: int) -> Packing:
    order = sorted_order(inputs)
    shares, inputs = [shares[i] for i in order], [inputs[i] for i in order]
    length_n = np.array([len(ids) for ids in inputs], dtype=np.int64)
    shared_n = shared_prefixes(inputs)
    limit = max(max_tokens, int(1.25 * max(length_n, default=0)))
    rows = cut_for_ranks(length_n, shared_n, limit, world_size)
    lengths = row_lengths(length_n, shared_n, rows)
    dealt = _even(_deal(lengths, world_size))

    def row(members: range) -> Row:
        own_n = shared_n[members.start : members.stop].copy()
        own_n[:1] = 0  # the sequence it shares a prefix with is in another row
        return Row(members, own_n)

    ranks = [[row(rows[batch[0]] if batch else range(0)) for batch in r] for r in dealt]
    return Packing(shares, ranks, sum(lengths))


def _last_sampled(sequence: TrainingSequence) -> int:
    return len(sequence.mask) - 1 - int(sequence.mask[::-1].argmax())


def _columns(shares: Shares, shared: Sequence[int]) -> Columns:
    sequences = [share.sequence for share in shares]
    length_n = np.array([1 + _last_sampled(sequence) for sequence in sequences], np.int32)
    sampled_n = np.array([sequence.mask.sum() for sequence in sequences], np.int32)
    token_n, places_n = _starts(length_n).tolist(), _starts(sampled_n).tolist()
    ids_l, flags_l = np.empty(token_n[-1], np.int32), np.empty(token_n[-1], np.uint8)
    sampler_t, advantage_t, temperature_t = (np.empty(places_n[-1], np.float32) for _ in range(3))
    for n, sequence in enumerate(sequences):
        here, length = slice(token_n[n], token_n[n + 1]), int(length_n[n])
        mask, constrained = sequence.mask[:length], sequence.constrained[:length]
        ids_l[here] = sequence.token_ids[:length]
        flags_l[here] = SAMPLED * mask + CONSTRAINED * constrained
        places = slice(places_n[n], places_n[n + 1])
        sampler_t[places] = sequence.logprobs[:length][mask]
        advantage_t[places] = sequence.advantages[:length][mask]
        temperature_t[places] = sequence.temperatures[:length][mask]
    return Columns(
        ids_l,
        flags_l,
        sampler_t,
        advantage_t,
        temperature_t,
        length_n,
        sampled_n,
        np.array(shared, np.int32),
        np.array([share.rollout for share in shares], np.int32),
        np.array([share.weight for share in shares], np.float32),
    )


def _starts(counts: NDArray[np.int32]) -> Ints:
    """Return where each stretch starts, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)


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
