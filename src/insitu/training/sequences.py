"""Recorded calls of one rollout → training sequences, without touching a single token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from insitu.errors import InvalidRequest
from insitu.types import ModelCall, TrainingSequence


@dataclass(slots=True)
class _Growing:
    """A sequence that later calls may still extend."""

    token_ids: list[int] = field(default_factory=list[int])
    mask: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])

    def extend_with(self, call: ModelCall) -> None:
        unseen_ids = call.prompt_ids[len(self.token_ids) :]
        self.token_ids += unseen_ids + call.output_ids
        self.mask += [0] * len(unseen_ids) + [1] * len(call.output_ids)
        self.logprobs += [0.0] * len(unseen_ids) + call.logprobs


def build_sequences(
    calls: Sequence[ModelCall], rollout_id: str, advantage: float
) -> tuple[list[TrainingSequence], int]:
    """Join calls whose prompt continues an earlier call exactly; start a new sequence otherwise.

    A call extends a sequence only when its prompt starts with every token of that sequence (earlier prompt
    and output); with several candidates the longest wins, so interleaved conversations each stay whole.
    Nothing is spliced and nothing is unmasked. Returns the sequences and the number of prefix breaks:
    calls after the first that had to start a sequence of their own.
    """
    growing: list[_Growing] = []
    for call in calls:
        _check(call)
        target = _longest_prefix(growing, call.prompt_ids)
        if target is None:
            target = _Growing()
            growing.append(target)
        target.extend_with(call)
    sequences = [TrainingSequence(rollout_id, g.token_ids, g.mask, g.logprobs, advantage) for g in growing]
    return sequences, max(0, len(growing) - 1)


def _longest_prefix(growing: Sequence[_Growing], prompt_ids: list[int]) -> _Growing | None:
    matching = [g for g in growing if prompt_ids[: len(g.token_ids)] == g.token_ids]
    return max(matching, key=lambda g: len(g.token_ids), default=None)


def _check(call: ModelCall) -> None:
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
    """Refuse what a model of this vocabulary and context cannot have sampled."""
    num_tokens, where = len(sequence.token_ids), f"a sequence of rollout {sequence.rollout_id}"
    if not num_tokens == len(sequence.mask) == len(sequence.logprobs):
        raise InvalidRequest(
            f"{where} has {num_tokens} ids, {len(sequence.mask)} mask entries and "
            f"{len(sequence.logprobs)} logprobs; they must be equally many"
        )
    if sequence.mask and sequence.mask[0]:
        raise InvalidRequest(
            f"{where} marks its first token as sampled, which has no context to be scored in"
        )
    if max_length is not None and num_tokens > max_length:
        raise InvalidRequest(f"{where} has {num_tokens} tokens, the base model takes {max_length}")
    for token in sequence.token_ids:
        if not 0 <= token < vocabulary_size:
            raise InvalidRequest(f"{where} has token id {token}, the base model knows {vocabulary_size}")
