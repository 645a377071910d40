"""What "exact" means: every trained token is one that was sampled, where, as and as likely as it was sampled.

The witnessed calls (`witness.py`) are the truth. `check_records` compares what the gateway recorded with
it, `check_sequences` what is trained on. `check_logprobs` and `check_packed` recompute the
log-probabilities, with Transformers alone and with the trainer's own packing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from insitu.training.batching import collate
from insitu.training.model.policy import Policy
from insitu.training.objective import objective_of, shares_of
from insitu.training.packing import pack
from insitu.types import ModelCall, StepSettings, TrainingSequence
from tests.support.sequences import parts_of
from tests.support.witness import Witnessed

EXACT = 1e-3
"""Largest |Δlogprob| between sampler and trainer in float32."""


Placed = tuple[int, range]
"""Where the output of a call is: number of the sequence, positions."""


class NotExact(AssertionError):
    """Something that is trained on was not sampled that way."""


def check_records(witnessed: Sequence[Witnessed], recorded: Sequence[ModelCall]) -> None:
    """Every call was recorded once: same prompt ids, same output ids, same logprobs."""
    by_id = {call.id: call for call in recorded}
    if sorted(by_id) != sorted(call.call_id for call in witnessed) or len(by_id) != len(recorded):
        raise NotExact(f"{len(witnessed)} calls were sampled, {len(recorded)} recorded ({len(by_id)} ids)")
    for seen in witnessed:
        call = by_id[seen.call_id]
        for what in ("prompt_ids", "output_ids", "logprobs"):
            if getattr(call, what) != getattr(seen, what):
                raise NotExact(f"call {call.id}: its {what} are not those of the engine")


def check_prompts(witnessed: Iterable[Witnessed], rendered: Iterable[list[int]], tokenizer: Any) -> int:
    """Every prompt says, byte for byte, what the template rendered. Returns how many have other ids.

    The gateway puts ids back that were sampled in earlier turns; that must never change the text.
    """
    # Byte-level tokens spell bytes, so joined they compare exactly, halves of characters included.
    ids = {tuple(prompt) for prompt in rendered}
    texts = {"".join(tokenizer.convert_ids_to_tokens(list(prompt))) for prompt in ids}
    others = [seen for seen in witnessed if tuple(seen.prompt_ids) not in ids]
    for seen in others:
        if "".join(tokenizer.convert_ids_to_tokens(seen.prompt_ids)) not in texts:
            raise NotExact(f"call {seen.call_id}: its prompt is not what the template rendered")
    return len(others)


def check_sequences(witnessed: Sequence[Witnessed], sequences: Sequence[TrainingSequence]) -> list[Placed]:
    """Sampled tokens and trained tokens correspond one to one: id, everything before it, mask, logprob."""
    unclaimed = [{index for index, flag in enumerate(s.mask) if flag} for s in sequences]
    placed: list[Placed] = []
    for seen in witnessed:
        number = next((i for i, s in enumerate(sequences) if _holds(s, seen, unclaimed[i])), None)
        if number is None:
            raise NotExact(f"no training sequence holds the tokens of call {seen.call_id} as sampled")
        unclaimed[number] -= set(_span(seen))
        placed.append((number, _span(seen)))
    if any(unclaimed):
        raise NotExact(f"{sum(map(len, unclaimed))} trained tokens were never sampled")
    return placed


def _span(seen: Witnessed) -> range:
    return range(len(seen.prompt_ids), len(seen.prompt_ids) + len(seen.output_ids))


def _holds(sequence: TrainingSequence, seen: Witnessed, unclaimed: set[int]) -> bool:
    span = _span(seen)
    return (
        sequence.token_ids[: span.stop].tolist() == seen.prompt_ids + seen.output_ids
        and unclaimed.issuperset(span)
        and sequence.logprobs[span.start : span.stop].tolist() == seen.logprobs
    )


@torch.no_grad()
def plain_logprobs(model: Any, sequence: TrainingSequence) -> list[float]:
    """The log-probabilities of the sampled tokens, by one plain forward pass of Transformers."""
    ids, sampled = (
        torch.from_numpy(sequence.token_ids).long(),
        torch.from_numpy(sequence.mask).nonzero()[:, 0],
    )
    logits = model(ids[None], logits_to_keep=sampled - 1).logits[0].float()
    logits = logits / torch.from_numpy(sequence.temperatures)[sampled, None]
    targets = ids[sampled]
    return logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1).tolist()


def recorded_logprobs(sequence: TrainingSequence) -> list[float]:
    """The sampler's log-probabilities of the sampled tokens."""
    return sequence.logprobs[sequence.mask].tolist()


@torch.no_grad()
def packed_logprobs(
    policy: Policy, sequences: Sequence[TrainingSequence], max_tokens: int = 2048
) -> tuple[list[float], list[float]]:
    """(recomputed by the trainer's packed forward, recorded by the sampler) of every sampled token."""
    settings = StepSettings()
    shares = shares_of(sequences, objective_of(settings), settings)
    packing = pack(shares, max_tokens, 1, policy.can_branch)
    new: list[float] = []
    recorded: list[float] = []
    for part in parts_of(packing):
        batch = collate(part)
        logprob_t, _ = policy(batch)
        new += logprob_t.tolist()
        recorded += batch.sampler_t.tolist()
    return new, recorded


def check_logprobs(model: Any, sequences: Sequence[TrainingSequence]) -> float:
    """The largest difference of plain Transformers to the record, refused beyond `EXACT`."""
    pairs = [(plain_logprobs(model, sequence), recorded_logprobs(sequence)) for sequence in sequences]
    return _refuse_beyond_exact([x for new, _ in pairs for x in new], [x for _, old in pairs for x in old])


def check_packed(policy: Policy, sequences: Sequence[TrainingSequence]) -> float:
    """The same with the trainer's packed forward, which must hold every sampled token once."""
    new, recorded = packed_logprobs(policy, sequences)
    expected = torch.tensor([logprob for s in sequences for logprob in recorded_logprobs(s)])
    if sorted(recorded) != sorted(expected.tolist()):
        raise NotExact(f"{len(recorded)} tokens were packed, {len(expected)} were sampled, or others")
    return _refuse_beyond_exact(new, recorded)


def _refuse_beyond_exact(recomputed: Sequence[float], recorded: Sequence[float]) -> float:
    gap = max(abs(ours - theirs) for ours, theirs in zip(recomputed, recorded, strict=True))
    if not gap <= EXACT:
        raise NotExact(f"recomputed and recorded logprobs differ by {gap:.3g}, allowed {EXACT:.3g}")
    return gap


def check_advantages(rewards: dict[str, float], sequences: Sequence[TrainingSequence]) -> None:
    """Without step rewards a rollout has one advantage, on its sampled tokens and nowhere else; a better
    rollout has a larger one, and the mean of the group is zero."""
    by_rollout = {sequence.rollout_id: max(sequence.advantages.tolist(), key=abs) for sequence in sequences}
    for sequence in sequences:
        if sequence.advantages.tolist() != [by_rollout[sequence.rollout_id] * flag for flag in sequence.mask]:
            raise NotExact("a rollout has several advantages, or on tokens that it did not sample")
    if set(by_rollout) != set(rewards) or abs(sum(by_rollout.values())) > 1e-6 * len(rewards):
        raise NotExact(f"the advantages {by_rollout} are not relative to the group")
    ranked = sorted(rewards, key=rewards.__getitem__)
    if any(by_rollout[worse] >= by_rollout[better] for worse, better in pairwise(ranked)):
        raise NotExact(f"the advantages {by_rollout} do not follow the rewards {rewards}")
