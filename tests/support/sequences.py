"""Training sequences from lists and from whole calls, and training on them without a supervisor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from insitu.backend.fleet.rank_info import limits_of
from insitu.records.call_tokens import CallTokens, call_tokens
from insitu.training.packing import Packing, Part, pack_step
from insitu.training.sequences import build_sequences, sequence_of
from insitu.types import ModelCall, StepSettings, TrainingSequence

if TYPE_CHECKING:
    from insitu.backend.fleet.trainer_rank import TrainerRank

COLUMNS = "token_ids", "mask", "logprobs", "advantages", "constrained", "temperatures"


def make_sequence(
    rollout_id: str,
    ids: list[int],
    mask: list[int],
    logprobs: list[float],
    advantage: float,
    constrained: bool = False,
) -> TrainingSequence:
    """A sequence of one call: one advantage for all its sampled tokens."""
    advantages = [advantage if flag else 0.0 for flag in mask]
    return sequence_of(rollout_id, ids, mask, logprobs, advantages, [int(constrained)] * len(ids))


def altered(sequence: TrainingSequence, **columns: Sequence[float]) -> TrainingSequence:
    """The same with other columns, given as lists."""
    kept = {name: getattr(sequence, name).tolist() for name in COLUMNS}
    return sequence_of(sequence.rollout_id, **(kept | columns))


def as_lists(sequence: TrainingSequence) -> dict[str, Any]:
    """Its rollout and its columns, to compare."""
    columns = {name: getattr(sequence, name).tolist() for name in COLUMNS}
    return {"rollout_id": sequence.rollout_id, **columns}


def join(
    calls: Sequence[ModelCall],
    rollout_id: str,
    advantages: Sequence[float],
    *,
    mask_constrained: bool = False,
    as_sampled: bool = True,
) -> tuple[list[TrainingSequence], int]:
    """`build_sequences` of calls that were stored whole."""
    whole: dict[str, CallTokens] = {}
    for call in calls:  # tests may give several calls one id
        name = f"{call.id}-{len(whole)}" if call.id in whole else call.id
        whole[name] = replace(call_tokens(call), id=name)
    return build_sequences(
        list(whole.values()), rollout_id, advantages, mask_constrained=mask_constrained, as_sampled=as_sampled
    )


def stored_whole(calls: Sequence[ModelCall]) -> dict[str, CallTokens]:
    """As a record store answers."""
    return {call.id: call_tokens(call) for call in calls}


def parts_of(packing: Packing, rank: int = 0) -> list[Part]:
    """The micro-batches that a rank receives."""
    return list(packing.rank_batch(rank).parts())


def train(
    rank: TrainerRank,
    run: str,
    sequences: Sequence[TrainingSequence],
    settings: StepSettings,
    reference_dir: str | None = None,
) -> dict[str, float]:
    """One step of a rank, planned as the supervisor plans it."""
    info = rank.info()
    packing = pack_step(sequences, settings, limits_of(info), info["world_size"])
    return rank.train_step(run, packing.rank_batch(info["rank"]), settings, reference_dir)
