"""Sequences → micro-batches under a token budget, planned once for all ranks; one message per rank.

If the model's attention supports branches, a micro-batch is one row: a forest in which every prefix that
sequences share is computed once (`trie.py`). Otherwise it is a padded batch with one sequence per row.
Either way, log-probabilities and gradients are the same as for each sequence alone.

A sequence is computed up to its last sampled token, exclusive: nothing later is in the loss, and nothing
later is sent. A rank receives its own micro-batches only, as columns: 5 bytes for each token, 4 more for
each sampled one (and 4 if a teacher scored it), and 12 for each call. `batching.py` makes tensors of them.

Shape suffixes: l tokens of all sequences one after the other, t the sampled ones among them, s stretches of
tokens sampled alike, n sequences, p micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from insitu.errors import InvalidRequest
from insitu.training.objective import Share, objective_of, scores_reference, shares_of
from insitu.training.sequences import check_sequence
from insitu.training.trie import Ints, cut_for_ranks, row_lengths, shared_prefixes, sorted_order
from insitu.types import StepSettings, TrainingSequence

Shares = Sequence[Share]

Number = TypeVar("Number", np.int32, np.float32)
SAMPLED, CONSTRAINED, STALE = np.uint8(1), np.uint8(2), np.uint8(4)
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
    sampled_s: NDArray[np.int32]
    """The number of sampled tokens of each stretch; the others have no stretch here."""
    advantage_s: NDArray[np.float32]
    temperature_s: NDArray[np.float32]
    length_n: NDArray[np.int32]
    sampled_n: NDArray[np.int32]
    stretches_n: NDArray[np.int32]
    shared_n: NDArray[np.int32]
    """In a forest, the number of leading tokens each shares with the one before; 0 in padded rows."""
    rollout_n: NDArray[np.int32]
    """The index of its rollout within the step."""
    weight_n: NDArray[np.float32]
    """Per sampled token."""
    teacher_t: NDArray[np.float32] | None = None
    """The log-probability that a teacher gave; None without one."""

    def parts(self, bounds: Iterable[tuple[int, int]]) -> Iterator[Columns]:
        """Yield views of the sequences from each first one up to the last, exclusive."""
        counts = {"l": self.length_n, "t": self.sampled_n, "s": self.stretches_n}
        starts = {along: _starts(column) for along, column in counts.items()}
        for first, last in bounds:
            here = {along: slice(start_n[first], start_n[last]) for along, start_n in starts.items()}
            here["n"] = slice(first, last)
            named = {f.name: getattr(self, f.name) for f in fields(self)}
            yield Columns(**{n: column[here[n[-1]]] for n, column in named.items() if column is not None})


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
        bounds = pairwise(_starts(self.num_sequences_p).tolist())
        for columns in self.columns.parts(bounds):
            yield Part(columns, self.is_forest)


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
            num_tokens=sum(sequence.num_trained for sequence in sequences),
            num_sequences=len(sequences),
            num_input_tokens=sum(len(sequence.token_ids) for sequence in sequences),
            num_computed_tokens=self.num_computed_tokens,
        )

    @property
    def num_bytes(self) -> int:
        """The bytes of all ranks' columns."""
        sequences = [share.sequence for share in self.shares]
        lengths = sum(map(num_sent, sequences))
        sampled = sum(sequence.num_trained for sequence in sequences)
        stretches = sum(int(sequence.trained_s.sum()) for sequence in sequences)
        taught = sum(sequence.num_trained for sequence in sequences if sequence.teacher_t is not None)
        return 5 * lengths + 4 * (sampled + taught) + 12 * stretches + 24 * len(sequences)

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
        _check_teacher(sequence, settings)
    shares = shares_of(sequences, objective_of(settings), settings)
    return pack(shares, limits.max_micro_batch_tokens, world_size, limits.can_branch)


def _check_teacher(sequence: TrainingSequence, settings: StepSettings) -> None:
    wanted = settings.method == "distill" and not scores_reference(settings)
    scored = 0 if sequence.teacher_t is None else len(sequence.teacher_t)
    if scored != (sequence.num_trained if wanted else 0):
        raise InvalidRequest(
            f"a sequence of rollout {sequence.rollout_id} has {sequence.num_trained} tokens in the loss, and "
            f"{scored} that a teacher scored"
        )


def pack(shares: Shares, max_tokens: int, world_size: int, can_branch: bool = True) -> Packing:
    """Deal the sequences so that ranks finish together, with at most `max_tokens` in a micro-batch.

    Rows with branches may be a quarter longer than the longest sequence: that takes little more memory than
    the sequence alone, and long histories are the ones worth sharing. A padded row longer than `max_tokens`
    gets a micro-batch to itself.
    """
    inputs = [share.sequence.token_ids[: num_sent(share.sequence) - 1] for share in shares]
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


def num_sent(sequence: TrainingSequence) -> int:
    """Return the number of tokens up to the last sampled one, inclusive."""
    last = int(np.flatnonzero(sequence.trained_s)[-1])
    return int(sequence.length_s[: last + 1].sum())


def _columns(shares: Shares, shared: Sequence[int]) -> Columns:
    sequences = [share.sequence for share in shares]
    length_n = np.array([num_sent(sequence) for sequence in sequences], np.int32)
    sampled_n = np.array([sequence.num_trained for sequence in sequences], np.int32)
    token_n, places_n = _starts(length_n).tolist(), _starts(sampled_n).tolist()
    ids_l, flags_l = np.empty(token_n[-1], np.int32), np.empty(token_n[-1], np.uint8)
    sampler_t = np.empty(places_n[-1], np.float32)
    for n, sequence in enumerate(sequences):
        here, length = slice(token_n[n], token_n[n + 1]), int(length_n[n])
        flags = SAMPLED * sequence.trained_s + CONSTRAINED * sequence.constrained_s + STALE * sequence.stale_s
        ids_l[here] = sequence.token_ids[:length]
        flags_l[here] = flags.repeat(sequence.length_s)[:length]
        sampler_t[places_n[n] : places_n[n + 1]] = sequence.logprobs[sequence.mask]
    return Columns(
        ids_l,
        flags_l,
        sampler_t,
        _of_trained(sequences, "length_s", np.int32),
        _of_trained(sequences, "advantage_s", np.float32),
        _of_trained(sequences, "temperature_s", np.float32),
        length_n,
        sampled_n,
        np.array([sequence.trained_s.sum() for sequence in sequences], np.int32),
        np.array(shared, np.int32),
        np.array([share.rollout for share in shares], np.int32),
        np.array([share.weight for share in shares], np.float32),
        _taught(sequences),
    )


def _taught(sequences: Sequence[TrainingSequence]) -> NDArray[np.float32] | None:
    """Join the teacher's column; all sequences of a step have one, or none has."""
    given = [sequence.teacher_t for sequence in sequences if sequence.teacher_t is not None]
    return np.concatenate(given) if given else None


def _of_trained(sequences: Sequence[TrainingSequence], column: str, dtype: type[Number]) -> NDArray[Number]:
    """Join a column of the stretches that are in the loss."""
    kept = [getattr(sequence, column)[sequence.trained_s] for sequence in sequences]
    return np.concatenate(kept) if kept else np.empty(0, dtype)


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
