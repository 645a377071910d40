"""Recorded calls of one rollout → training sequences, without touching a single token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from insitu.errors import InvalidRequest
from insitu.records.call_tokens import CallTokens
from insitu.training.sampling import is_narrowed, temperature_of
from insitu.training.strands import Place, Strands, floats_of
from insitu.types import TrainingSequence

_PER_TOKEN = {
    "token_ids": np.int32,
    "mask": np.bool_,
    "logprobs": np.float32,
    "advantages": np.float32,
    "constrained": np.bool_,
    "temperatures": np.float32,
}


def sequence_of(
    rollout_id: str,
    token_ids: Iterable[int],
    mask: Iterable[int],
    logprobs: Iterable[float],
    advantages: Iterable[float],
    constrained: Iterable[int],
    temperatures: Iterable[float] | None = None,
) -> TrainingSequence:
    """Build a sequence from lists; without temperatures every token was sampled at 1."""
    ids = list(token_ids)
    lists = (ids, mask, logprobs, advantages, constrained, temperatures or [1.0] * len(ids))
    columns = (np.array(list(c), dtype) for c, dtype in zip(lists, _PER_TOKEN.values(), strict=True))
    return TrainingSequence(rollout_id, *columns)


@dataclass(frozen=True, slots=True)
class _Member:
    """A call of a sequence."""

    call: CallTokens
    place: Place
    advantage: float
    trained: bool


class _Index:
    """Sequences that later calls may still extend, by the length and hash of their tokens."""

    def __init__(self) -> None:
        self._by_length: dict[int, dict[int, list[list[_Member]]]] = {}

    def take_longest(self, place: Place) -> list[_Member] | None:
        """Remove and return the longest sequence that a call's prompt starts with."""
        lengths = sorted((length for length in self._by_length if length <= place.num_prompt), reverse=True)
        keys = place.strand.hashes(np.array(lengths, dtype=np.int64))
        for length, key in zip(lengths, keys, strict=True):
            candidates = self._by_length[length].get(key, [])
            for members in reversed(candidates):
                if place.starts_with(members[-1].place):
                    self._remove(length, key, members)
                    return members
        return None

    def _remove(self, length: int, key: int, members: list[_Member]) -> None:
        by_hash = self._by_length[length]
        by_hash[key] = [other for other in by_hash[key] if other is not members]
        if not by_hash[key]:
            del by_hash[key]
        if not by_hash:
            del self._by_length[length]

    def put(self, members: list[_Member]) -> None:
        """Make a sequence available to later calls."""
        last = members[-1].place
        by_hash = self._by_length.setdefault(last.end, {})
        by_hash.setdefault(last.strand.hash(last.end), []).append(members)


def build_sequences(
    calls: Sequence[CallTokens],
    rollout_id: str,
    advantages: Sequence[float],
    *,
    stored: Mapping[str, CallTokens] | None = None,
    mask_constrained: bool = False,
) -> tuple[list[TrainingSequence], int]:
    """Join calls whose prompt continues an earlier call exactly; start a new sequence otherwise.

    A call extends a sequence only when its prompt starts with every token of that sequence (earlier prompt
    and output); with several candidates the longest wins, so interleaved conversations each stay whole.
    Nothing is spliced and nothing is unmasked. Every sampled token has the advantage of its call;
    `advantages` holds one per call. Return the sequences and the number of prefix breaks: calls after the
    first that had to start a new sequence.

    `stored` has the calls that these are stored against, if any. `mask_constrained` excludes tokens sampled
    under a grammar from the loss: they stay as context, and a sequence with no other sampled tokens is
    dropped.
    """
    strands = Strands(stored or {})
    every: list[list[_Member]] = []
    index = _Index()
    for call, advantage in zip(calls, advantages, strict=True):
        _check(call)
        place = strands.place(call)
        members = index.take_longest(place)
        if members is None:
            members = []
            every.append(members)
        members.append(_Member(call, place, advantage, not (mask_constrained and call.constrained)))
        index.put(members)
    made = [_joined(rollout_id, members) for members in every]
    sequences = [sequence for sequence in made if not mask_constrained or sequence.mask.any()]
    return sequences, max(0, len(every) - 1)


def _joined(rollout_id: str, members: Sequence[_Member]) -> TrainingSequence:
    """Write out the columns of calls of which each continues the one before."""
    last = members[-1].place
    num_tokens = last.end
    mask, constrained = (np.zeros(num_tokens, np.bool_) for _ in range(2))
    logprobs, advantages = (np.zeros(num_tokens, np.float32) for _ in range(2))
    temperatures = np.ones(num_tokens, np.float32)
    for member in members:
        sampled = slice(member.place.num_prompt, member.place.end)
        constrained[sampled] = member.call.constrained or is_narrowed(member.call.sampling)
        if member.trained:
            mask[sampled] = True
            logprobs[sampled] = floats_of(member.call.logprobs)
            advantages[sampled] = member.advantage
            temperatures[sampled] = temperature_of(member.call.sampling)
    # A copy: the strand may be longer, or the beginning of other sequences.
    ids = last.strand.ids(num_tokens).copy()
    return TrainingSequence(rollout_id, ids, mask, logprobs, advantages, constrained, temperatures)


def _check(call: CallTokens) -> None:
    if not call.complete:
        raise InvalidRequest(
            f"call {call.id} ended `{call.finish_reason}`: its answer is incomplete",
            hint="upload rollouts without their incomplete calls",
        )
    if len(call.output_ids) != len(call.logprobs):
        raise InvalidRequest(
            f"call {call.id} has {call.num_output} output ids but {len(floats_of(call.logprobs))} logprobs",
            hint="record the call through the gateway; without its logprobs it cannot be trained on",
        )
    if not call.prompt_ids and not call.num_shared:
        raise InvalidRequest(
            f"call {call.id} has an empty prompt: its first sampled token has no context to be scored in",
            hint="send at least one prompt token (a beginning-of-sequence token will do)",
        )


def check_sequence(sequence: TrainingSequence, vocabulary_size: int, max_length: int | None) -> None:
    """Reject a sequence that a model of this vocabulary and context length cannot have sampled."""
    ids, where = sequence.token_ids, f"a sequence of rollout {sequence.rollout_id}"
    counts = {name: len(getattr(sequence, name)) for name in _PER_TOKEN}
    if set(counts.values()) != {len(ids)}:
        listed = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise InvalidRequest(f"{where} has {listed}; they must be equally many")
    if len(ids) == 0:
        return
    if sequence.mask[0]:
        raise InvalidRequest(
            f"{where} marks its first token as sampled, which has no context to be scored in"
        )
    if max_length is not None and len(ids) > max_length:
        raise InvalidRequest(f"{where} has {len(ids)} tokens, the base model takes {max_length}")
    for token in (int(ids.min()), int(ids.max())):
        if not 0 <= token < vocabulary_size:
            raise InvalidRequest(f"{where} has token id {token}, the base model knows {vocabulary_size}")
    if not sequence.temperatures.min() > 0:  # also if it is not a number
        raise InvalidRequest(f"{where} has temperature {sequence.temperatures.min()}; it must be above 0")
