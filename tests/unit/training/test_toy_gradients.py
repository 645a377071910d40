"""The gradient of a step on a policy small enough to know the true one: a table of logits.

Every token of the vocabulary is a rollout, weighted by its probability, so a sum over the rollouts is the
expectation and no sampling noise is left. All else is the trainer's own code: sequences, packing, the head
with its temperatures, and the terms of the loss.

Shape suffixes: t sampled tokens, u distinct ones, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from insitu.training.batching import MicroBatch, collate
from insitu.training.model.logprobs import token_logprobs
from insitu.training.objective import Share, objective_of
from insitu.training.packing import pack
from insitu.training.step import forward_backward
from insitu.types import Loss, ModelCall, StepSettings
from tests.support.sequences import join, parts_of

SIZE = 32
EXACT = 0.999
pytestmark = pytest.mark.timeout(60)


def logits(seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def every_token(
    logits_v: Tensor, advantage_v: Tensor, temperature: float = 1.0, as_sampled: bool = True
) -> MicroBatch:
    """One rollout per token, recorded at this temperature and weighted by its probability."""
    recorded_v = torch.log_softmax(logits_v / temperature, -1)
    shares: list[Share] = []
    for token, (logprob, advantage) in enumerate(zip(recorded_v.tolist(), advantage_v.tolist(), strict=True)):
        made = ModelCall(f"c{token}", f"r{token}", "m", "m", 0, "m@0", [0], [token], [logprob], "stop")
        call = replace(made, sampling={"temperature": temperature})
        (sequence,), _ = join([call], f"r{token}", [advantage], as_sampled=as_sampled)
        shares.append(Share(sequence, token, float(recorded_v[token].exp())))
    (part,) = parts_of(pack(shares, 4 * SIZE, 1))
    return collate(part)


def table(logits_v: Tensor) -> Callable[[MicroBatch], tuple[Tensor, Tensor]]:
    """Score as a policy whose hidden state is its table of logits."""
    head = nn.Linear(SIZE, SIZE, bias=False).requires_grad_(False)
    nn.init.eye_(head.weight)

    def score(batch: MicroBatch) -> tuple[Tensor, Tensor]:
        hidden_uv = logits_v.expand(len(batch.target_u), -1)
        logprob_u, entropy_u = token_logprobs(hidden_uv, head, batch.target_u, batch.temperature_u)
        return logprob_u[batch.pick_t], entropy_u[batch.pick_t]

    return score


def our_gradient(
    logits_v: Tensor, batch: MicroBatch, settings: StepSettings, reference_v: Tensor | None = None
) -> Tensor:
    leaf_v = logits_v.clone().requires_grad_()
    reference = table(logits_v if reference_v is None else reference_v)
    forward_backward(table(leaf_v), reference, batch, objective_of(settings), settings)
    assert leaf_v.grad is not None
    return leaf_v.grad


def true_gradient(logits_v: Tensor, value: Callable[[Tensor], Tensor]) -> Tensor:
    """Differentiate what is to be minimised, as a function of the whole table."""
    leaf_v = logits_v.double().requires_grad_()
    value(leaf_v).backward()
    assert leaf_v.grad is not None
    return leaf_v.grad


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0))


@pytest.mark.parametrize("loss", ["dapo", "gspo", "cispo"])
@pytest.mark.parametrize("drift", [1.0, 3.0, 6.0])
def test_the_kl_penalty_has_the_gradient_of_the_reverse_kl(drift: float, loss: Loss) -> None:
    reference_v = logits(0)
    policy_v = reference_v + logits(1, drift)
    batch = every_token(policy_v, torch.zeros(SIZE))
    settings = StepSettings(loss=loss, beta=0.5)
    ours = our_gradient(policy_v, batch, settings, reference_v)

    def penalty(leaf_v: Tensor) -> Tensor:
        log_p_v = torch.log_softmax(leaf_v, -1)
        return 0.5 * (log_p_v.exp() * (log_p_v - torch.log_softmax(reference_v.double(), -1))).sum()

    true = true_gradient(policy_v, penalty)
    assert cosine(ours, true) >= EXACT
    assert float(ours.norm() / true.norm()) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("weights", [None, 2.0])
@pytest.mark.parametrize("loss", ["dapo", "cispo"])
@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_the_reward_has_its_true_gradient_at_the_temperature_of_the_calls(
    temperature: float, loss: Loss, weights: float | None
) -> None:
    policy_v, reward_v = logits(2, 2.0), logits(3)
    batch = every_token(policy_v, reward_v, temperature)
    settings = StepSettings(loss=loss, max_sampler_weight=weights)

    def cost(leaf_v: Tensor) -> Tensor:
        return -(torch.softmax(leaf_v / temperature, -1) * reward_v).sum()

    true = true_gradient(policy_v, cost)
    assert cosine(our_gradient(policy_v, batch, settings), true) >= EXACT
    ignored = our_gradient(policy_v, replace(batch, temperature_u=None), settings)
    assert cosine(ignored, true) < EXACT, "the test would not notice a temperature of 1"


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize(("temperature", "distance"), [(1.0, 1.0), (1.0, 6.0), (0.7, 1.0), (1.5, 3.0)])
def test_distillation_has_the_gradient_of_the_reverse_kl_to_the_teacher(
    temperature: float, distance: float, by_column: bool
) -> None:
    """At temperature 1, whatever the tokens were sampled at: the importance weights make up for it."""
    teacher_v = logits(4)
    policy_v = teacher_v + logits(5, distance)
    batch = every_token(policy_v, torch.ones(SIZE), temperature, as_sampled=False)
    settings = StepSettings(method="distill", teacher="other@1", max_sampler_weight=100.0)
    if by_column:
        scores_t, _ = table(teacher_v)(batch)
        batch, settings = replace(batch, teacher_t=scores_t), replace(settings, teacher="big")
    ours = our_gradient(policy_v, batch, settings, teacher_v)

    def distance_to_teacher(leaf_v: Tensor) -> Tensor:
        log_p_v = torch.log_softmax(leaf_v, -1)
        return (log_p_v.exp() * (log_p_v - torch.log_softmax(teacher_v.double(), -1))).sum()

    true = true_gradient(policy_v, distance_to_teacher)
    assert cosine(ours, true) >= EXACT
    assert float(ours.norm() / true.norm()) == pytest.approx(1.0, rel=1e-3)
    if temperature != 1:
        unweighted = our_gradient(policy_v, batch, replace(settings, max_sampler_weight=None), teacher_v)
        assert cosine(unweighted, true) < EXACT, "the test would not notice missing weights"
