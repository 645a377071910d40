"""Random rollouts whose sequences overlap in every way: prompts, turns, prefix breaks, duplicates."""

from __future__ import annotations

import random
from collections.abc import Callable

from insitu.training.objective import Share
from insitu.training.sequences import sequence_of
from insitu.types import TrainingSequence


def random_shares(seed: int, num_groups: int, vocabulary: int = 97, longest: int = 24) -> list[Share]:
    """Groups of rollouts on a common prompt. A small alphabet makes sampled tokens coincide."""
    rng = random.Random(seed)
    alphabet = [rng.randrange(vocabulary) for _ in range(rng.choice([2, 5, vocabulary]))]

    def tokens(most: int, least: int = 1) -> list[int]:
        return [rng.choice(alphabet) for _ in range(rng.randint(least, most))]

    shares: list[Share] = []
    rollout = 0
    for _ in range(num_groups):
        prompt = tokens(longest)
        for _ in range(rng.randint(1, 4)):
            for sequence in _sequences(rng, f"rollout-{rollout}", prompt, tokens):
                shares.append(Share(sequence, rollout, rng.uniform(0.1, 1.0)))
            rollout += 1
    if rng.random() < 0.5:
        shares.append(Share(shares[0].sequence, rollout, rng.uniform(0.1, 1.0)))
    rng.shuffle(shares)
    return shares


def _sequences(
    rng: random.Random, rollout_id: str, prompt: list[int], tokens: Callable[..., list[int]]
) -> list[TrainingSequence]:
    """One to three turns; after a prefix break a new sequence keeps some beginning of the old one."""
    made: list[TrainingSequence] = []
    ids, advantages = list(prompt), [0.0] * len(prompt)
    for turn in range(rng.randint(1, 3)):
        if turn and rng.random() < 0.4:
            made.append(_sequence(rng, rollout_id, ids, advantages))
            kept = rng.randint(0, len(ids))
            ids, advantages = ids[:kept], [0.0] * kept
        told, sampled = tokens(6, 0 if ids else 1), tokens(6)
        ids = ids + told + sampled
        advantages = advantages + [0.0] * len(told) + [rng.choice([-1.0, 0.5, 2.0])] * len(sampled)
    made.append(_sequence(rng, rollout_id, ids, advantages))
    if rng.random() < 0.3:  # what a tool said last
        told = tokens(4)
        made[-1] = _sequence(rng, rollout_id, ids + told, advantages + [0.0] * len(told))
    return made


def _sequence(
    rng: random.Random, rollout_id: str, ids: list[int], advantages: list[float]
) -> TrainingSequence:
    """What has an advantage was sampled."""
    mask = [int(advantage != 0.0) for advantage in advantages]
    logprobs = [-4.0 - rng.random() if flag else 0.0 for flag in mask]
    return sequence_of(rollout_id, ids, mask, logprobs, advantages, [0] * len(ids))
