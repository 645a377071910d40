"""Recorded calls of one rollout → training sequences, without touching a single token."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from insitu.errors import InvalidRequest
from insitu.types import ModelCall, TrainingSequence

_PER_TOKEN = ("token_ids", "mask", "logprobs", "advantages", "constrained")


class _Index:
    """Sequences that later calls may still extend, indexed by the digest of their tokens.

    All prefixes of a prompt are hashed in one pass, so joining costs the sum of the prompts' lengths, however
    many sequences a rollout has.
    """

    def __init__(self) -> None:
        self._by_length: dict[int, dict[bytes, list[TrainingSequence]]] = {}

    def take_longest(self, prompt_ids: list[int]) -> TrainingSequence | None:
        """Remove and return the longest sequence that `prompt_ids` starts with."""
        packed = memoryview(_packed(prompt_ids))
        digest, digested = hashlib.blake2b(), 0
        found: tuple[int, bytes] | None = None
        for length in sorted(length for length in self._by_length if length <= len(prompt_ids)):
            end = length * array("q").itemsize
            digest.update(packed[digested:end])
            digested = end
            if (key := digest.digest()) in self._by_length[length]:
                found = (length, key)
        if found is None:
            return None
        length, key = found
        by_digest = self._by_length[length]
        sequence = by_digest[key].pop()
        if not by_digest[key]:
            del by_digest[key]
        if not by_digest:
            del self._by_length[length]
        return sequence

    def put(self, sequence: TrainingSequence) -> None:
        """Make a sequence available to later calls."""
        key = hashlib.blake2b(_packed(sequence.token_ids)).digest()
        self._by_length.setdefault(len(sequence.token_ids), {}).setdefault(key, []).append(sequence)


def build_sequences(
    calls: Sequence[ModelCall],
    rollout_id: str,
    advantages: Sequence[float],
    *,
    mask_constrained: bool = False,
) -> tuple[list[TrainingSequence], int]:
    """Join calls whose prompt continues an earlier call exactly; start a new sequence otherwise.

    A call extends a sequence only when its prompt starts with every token of that sequence (earlier prompt
    and output); with several candidates the longest wins, so interleaved conversations each stay whole.
    Nothing is spliced and nothing is unmasked. Every sampled token has the advantage of its call;
    `advantages` holds one per call. Return the sequences and the number of prefix breaks: calls after the
    first that had to start a new sequence.

    `mask_constrained` excludes tokens sampled under a grammar from the loss: they stay as context, and a
    sequence with no other sampled tokens is dropped.
    """
    every: list[TrainingSequence] = []
    index = _Index()
    for call, advantage in zip(calls, advantages, strict=True):
        _check(call)
        target = index.take_longest(call.prompt_ids)
        if target is None:
            target = TrainingSequence(rollout_id, [], [], [], [], [])
            every.append(target)
        _extend(target, call, advantage, trained=not (mask_constrained and call.constrained))
        index.put(target)
    sequences = [sequence for sequence in every if not mask_constrained or any(sequence.mask)]
    return sequences, max(0, len(every) - 1)


def _extend(sequence: TrainingSequence, call: ModelCall, advantage: float, *, trained: bool) -> None:
    """Append a call whose prompt starts with every token of the sequence, in place."""
    unseen_ids, num_sampled = call.prompt_ids[len(sequence.token_ids) :], len(call.output_ids)
    context = [0.0] * len(unseen_ids)
    sequence.token_ids.extend(unseen_ids + call.output_ids)
    sequence.mask.extend([0] * len(unseen_ids) + [int(trained)] * num_sampled)
    sequence.logprobs.extend(context + (call.logprobs if trained else [0.0] * num_sampled))
    sequence.advantages.extend(context + [advantage if trained else 0.0] * num_sampled)
    sequence.constrained.extend([0] * len(unseen_ids) + [int(call.constrained)] * num_sampled)


def _packed(ids: list[int]) -> bytes:
    return array("q", ids).tobytes()


def _check(call: ModelCall) -> None:
    if not call.complete:
        raise InvalidRequest(
            f"call {call.id} ended `{call.finish_reason}`: its answer is incomplete",
            hint="upload rollouts without their incomplete calls",
        )
    if len(call.output_ids) != len(call.logprobs):
        raise InvalidRequest(
            f"call {call.id} has {len(call.output_ids)} output ids but {len(call.logprobs)} logprobs",
            hint="record the call through the gateway; without its logprobs it cannot be trained on",
        )
    if not call.prompt_ids:
        raise InvalidRequest(
            f"call {call.id} has an empty prompt: its first sampled token has no context to be scored in",
            hint="send at least one prompt token (a beginning-of-sequence token will do)",
        )


def check_sequence(sequence: TrainingSequence, vocabulary_size: int, max_length: int | None) -> None:
    """Reject a sequence that a model of this vocabulary and context length cannot have sampled."""
    num_tokens, where = len(sequence.token_ids), f"a sequence of rollout {sequence.rollout_id}"
    counts = {name: len(getattr(sequence, name)) for name in _PER_TOKEN}
    if set(counts.values()) != {num_tokens}:
        listed = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise InvalidRequest(f"{where} has {listed}; they must be equally many")
    if sequence.mask and sequence.mask[0]:
        raise InvalidRequest(
            f"{where} marks its first token as sampled, which has no context to be scored in"
        )
    if max_length is not None and num_tokens > max_length:
        raise InvalidRequest(f"{where} has {num_tokens} tokens, the base model takes {max_length}")
    for token in sequence.token_ids:
        if not 0 <= token < vocabulary_size:
            raise InvalidRequest(f"{where} has token id {token}, the base model knows {vocabulary_size}")
