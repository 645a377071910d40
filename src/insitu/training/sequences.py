"""Recorded calls of one rollout → training sequences, without touching a single token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from insitu.errors import InvalidRequest
from insitu.records.call_tokens import DEMONSTRATION, CallTokens
from insitu.training.sampling import is_narrowed, temperature_of
from insitu.training.strands import Place, Strands, floats_of
from insitu.types import TrainingSequence


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Tokens that were read, or sampled alike."""

    trained: bool = False
    advantage: float = 0.0
    constrained: bool = False
    temperature: float = 1.0
    stale: bool = False


_READ = _Stretch()


def sequence_of(
    rollout_id: str,
    token_ids: Iterable[int],
    mask: Iterable[int],
    logprobs: Iterable[float],
    advantages: Iterable[float],
    constrained: Iterable[int],
    temperatures: Iterable[float] | None = None,
) -> TrainingSequence:
    """Build a sequence from lists, one entry per token; without temperatures all were sampled at 1."""
    ids = list(token_ids)
    columns = {
        "token_ids": ids,
        "mask": list(mask),
        "logprobs": list(logprobs),
        "advantages": list(advantages),
        "constrained": list(constrained),
        "temperatures": [1.0] * len(ids) if temperatures is None else list(temperatures),
    }
    if len({len(column) for column in columns.values()}) > 1:
        listed = ", ".join(f"{len(column)} {name}" for name, column in columns.items())
        raise InvalidRequest(f"a sequence of rollout {rollout_id} has {listed}; they must be equally many")
    alike = zip(
        *(columns[name] for name in ("mask", "advantages", "constrained", "temperatures")), strict=True
    )
    stretches = groupby(_Stretch(bool(m), float(a), bool(c), float(t)) for m, a, c, t in alike)
    runs = [(stretch, sum(1 for _ in same)) for stretch, same in stretches]
    return _sequence(rollout_id, np.array(ids, np.int32), np.array(columns["logprobs"], np.float32), runs)


def _sequence(
    rollout_id: str,
    ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    runs: Iterable[tuple[_Stretch, int]],
    calls: Sequence[str] = (),
) -> TrainingSequence:
    """Write the stretches, each with its number of tokens, as columns."""
    kept = [(stretch, count) for stretch, count in runs if count]
    return TrainingSequence(
        rollout_id,
        ids,
        logprobs,
        np.array([count for _, count in kept], np.int32),
        np.array([stretch.trained for stretch, _ in kept], np.bool_),
        np.array([stretch.advantage for stretch, _ in kept], np.float32),
        np.array([stretch.constrained for stretch, _ in kept], np.bool_),
        np.array([stretch.temperature for stretch, _ in kept], np.float32),
        np.array([stretch.stale for stretch, _ in kept], np.bool_),
        calls=tuple(calls),
    )


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
    as_sampled: bool = True,
    step: int | None = None,
) -> tuple[list[TrainingSequence], int]:
    """Join calls whose prompt continues an earlier call exactly; start a new sequence otherwise.

    A call extends a sequence only when its prompt starts with every token of that sequence (earlier prompt
    and output); with several candidates the longest wins, so interleaved conversations each stay whole.
    Nothing is spliced and nothing is unmasked. Every sampled token has the advantage of its call;
    `advantages` holds one per call. Return the sequences and the number of prefix breaks: calls after the
    first that had to start a new sequence.

    `stored` has the calls that these are stored against, if any. `mask_constrained` excludes tokens sampled
    under a grammar from the loss: they stay as context, and a sequence with no other sampled tokens is
    dropped. Without `as_sampled` tokens are scored at temperature 1, whatever they were sampled at. Calls
    that were answered before `step`, that of the weights in training, are marked as stale.
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
    made = [_joined(rollout_id, members, as_sampled, step) for members in every]
    sequences = [sequence for sequence in made if not mask_constrained or sequence.trained_s.any()]
    return sequences, max(0, len(every) - 1)


def _joined(
    rollout_id: str, members: Sequence[_Member], as_sampled: bool, step: int | None
) -> TrainingSequence:
    """Write out calls of which each continues the one before."""
    last = members[-1].place
    logprobs = np.zeros(last.end, np.float32)
    runs: list[tuple[_Stretch, int]] = []
    written = 0
    for member in members:
        place, temperature = member.place, temperature_of(member.call.sampling)
        constrained = _differs(member.call) or (not as_sampled and temperature != 1)
        answer = _Stretch(constrained=constrained)
        if member.trained:
            stale = step is not None and member.call.policy_step < step
            scored_at = temperature if as_sampled else 1.0
            answer = _Stretch(True, member.advantage, constrained, scored_at, stale)
            logprobs[place.num_prompt : place.end] = floats_of(member.call.logprobs)
        runs += [(_READ, place.num_prompt - written), (answer, place.end - place.num_prompt)]
        written = place.end
    # A copy: the strand may be longer, or the beginning of other sequences.
    ids = last.strand.ids(last.end).copy()
    calls = [member.call.id for member in members if member.trained and member.call.num_output]
    return _sequence(rollout_id, ids, logprobs, runs, calls)


def _differs(call: CallTokens) -> bool:
    """Return True if the recorded logprobs are not those of the policy at the call's temperature."""
    return call.constrained or call.source == DEMONSTRATION or is_narrowed(call.sampling)


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
    if len(ids) == 0:
        return
    if sequence.trained_s[0]:
        raise InvalidRequest(
            f"{where} marks its first token as sampled, which has no context to be scored in"
        )
    if max_length is not None and len(ids) > max_length:
        raise InvalidRequest(f"{where} has {len(ids)} tokens, the base model takes {max_length}")
    for token in (int(ids.min()), int(ids.max())):
        if not 0 <= token < vocabulary_size:
            raise InvalidRequest(f"{where} has token id {token}, the base model knows {vocabulary_size}")
    if not sequence.temperature_s.min() > 0:  # also if it is not a number
        raise InvalidRequest(f"{where} has temperature {sequence.temperature_s.min()}; it must be above 0")
