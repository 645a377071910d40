"""What stands between a mistake and a trained model, each as one function of a small world.

The checks of the exactness zoo, the figures of a step, the gateway's verification, the probe: they pass on
what is right and raise on what is not.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from insitu.backend.serving.probe import compare, judge
from insitu.gateway.engines.sample import Generated, verify
from insitu.training.model.loading import load_policy
from insitu.types import StepSettings
from tests.support.exactness import (
    NotExact,
    check_advantages,
    check_logprobs,
    check_packed,
    check_prompts,
    check_records,
    check_sequences,
)
from tests.support.sequences import train
from tests.support.small_world import RUN, TARGET, World

MISMATCH_ALARM = 0.01
"""Of `mismatch/mean_abs`; a healthy step in float32 stays below a thousandth of it."""


def the_records(world: World) -> None:
    for rollout, seen in world.witnessed.items():
        check_records(seen, world.calls[rollout])


def the_prompts(world: World) -> None:
    seen = [call for each in world.witnessed.values() for call in each]
    sent = [call.prompt_ids for calls in world.calls.values() for call in calls]
    check_prompts(seen, sent, world.tokenizer)


def the_tokens(world: World) -> None:
    sequences = world.sequences()
    for rollout, seen in world.witnessed.items():
        check_sequences(seen, [sequence for sequence in sequences if sequence.rollout_id == rollout])


def the_logprobs(world: World) -> None:
    check_logprobs(world.model, world.sequences())


def the_packing(world: World) -> None:
    check_packed(load_policy(str(world.folder), torch.device("cpu")), world.sequences())


def the_advantages(world: World) -> None:
    check_advantages(world.rewards, world.sequences())


def the_figures(world: World) -> None:
    """`mismatch/mean_abs` of a step, which also refuses sequences that cannot be."""
    figures = train(world.trainer(), RUN, world.sequences(), StepSettings())
    if not figures["mismatch/mean_abs"] <= MISMATCH_ALARM:
        raise NotExact(f"mismatch/mean_abs is {figures['mismatch/mean_abs']:.3g}")


def the_direction(world: World) -> None:
    """A step makes the best rollout likelier and the worst one rarer."""
    rank, ranked = world.trainer(), sorted(world.rewards, key=world.rewards.__getitem__)
    calls = [world.calls[rollout][-1] for rollout in (ranked[0], ranked[-1])]
    ids = [call.prompt_ids + call.output_ids for call in calls]
    before = [sum(row) for row in rank.score(RUN, ids)]
    train(rank, RUN, world.sequences(), StepSettings(learning_rate=3e-3))
    after = [sum(row) for row in rank.score(RUN, ids)]
    if not (after[0] < before[0] and after[1] > before[1]):
        raise NotExact(f"worst and best went from {before} to {after}")


def the_gateway(world: World) -> None:
    seen = [call for each in world.witnessed.values() for call in each]
    for call, answer in zip(seen, world.answers, strict=True):
        generated = Generated()
        generated.add(answer)
        verify(generated, len(call.prompt_ids), TARGET)


def the_probe(world: World) -> None:
    """What is published after a step is what the trainer has."""
    rank, ids = world.trainer(), [sequence.token_ids.tolist() for sequence in world.sequences()]
    engine_before, trainer_before = _scored(world.model, ids), rank.score(RUN, ids)
    train(rank, RUN, world.sequences(), StepSettings(learning_rate=3e-3))
    published = world.folder / "published"
    rank.export_merged(RUN, str(published), "float32")
    engine: Any = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    result = compare(trainer_before, rank.score(RUN, ids), engine_before, _scored(engine, ids))
    judge(result, MISMATCH_ALARM, "replica-0", "run@4")


@torch.no_grad()
def _scored(model: Any, rows: list[list[int]]) -> list[list[float]]:
    scores: list[list[float]] = []
    for ids in rows:
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        scores.append(logprobs.gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1).tolist())
    return scores
