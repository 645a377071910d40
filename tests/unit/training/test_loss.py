"""The objective by hand, and the logprobs against plain log-softmax."""

from __future__ import annotations

import math

import pytest
import torch

from insitu.training.loss import (
    cispo_loss,
    clipped_high,
    clipped_loss,
    clipped_low,
    k3_kl,
    rollout_ratio,
    sampler_weight,
    token_ratio,
)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.1, 2.0, -2.2, False),
        (1.5, 2.0, -2.56, True),  # 1 + 0.28
        (0.5, 2.0, -1.0, False),  # a good token that became rarer still pulls
        (0.5, -1.0, 0.8, True),  # 1 - 0.2
        (1.5, -1.0, 1.5, False),  # a bad token that became likelier is not protected
    ],
)
def test_clip_by_hand(ratio: float, advantage: float, expected: float, clipped: bool) -> None:
    ratio_t, a = torch.tensor([ratio]), torch.tensor([advantage])
    assert clipped_loss(ratio_t, a, 0.2, 0.28).item() == pytest.approx(expected, rel=1e-6)
    assert (clipped_high(ratio_t, a, 0.28) | clipped_low(ratio_t, a, 0.2)).item() is clipped


def test_clipped_tokens_have_no_gradient() -> None:
    new = torch.tensor([-1.0, -2.0, -2.5], requires_grad=True)
    old, advantage = torch.tensor([-2.0, -2.0, -1.0]), torch.tensor([1.0, 1.0, -1.0])
    clipped_loss(token_ratio(new, old), advantage, 0.2, 0.28).sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.0, -1.0, 0.0])


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    ratio = token_ratio(new, torch.tensor([-3.0, -2.0]))  # e², 1
    cispo_loss(new, ratio, torch.tensor([1.0, -2.0]), 4.0).sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-5.0, 2.0])


def test_rollout_ratio_has_the_value_and_the_gradient_of_the_whole() -> None:
    old = torch.tensor([-1.0, -2.0, -0.5])
    new = torch.tensor([-0.7, -2.5, -0.1], requires_grad=True)
    whole = torch.exp((new - old).mean())
    whole.backward()
    expected, new.grad = new.grad, None
    ratio = rollout_ratio(new, (new - old).mean().expand(3))
    assert ratio.tolist() == pytest.approx([whole.item()] * 3)
    ratio.mean().backward()
    torch.testing.assert_close(new.grad, expected)


def test_sampler_weights_are_capped_and_carry_no_gradient() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    weight = sampler_weight(old, torch.tensor([-1.0, -3.0, 0.0]), 2.0)
    assert weight.tolist() == pytest.approx([1.0, 2.0, math.exp(-1)])
    assert not weight.requires_grad


def test_k3_by_hand_and_in_expectation() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.25, 0.25])
    assert k3_kl(p.log(), p.log()).abs().max() == 0
    assert k3_kl(p.log(), q.log())[0].item() == pytest.approx(0.5 / 0.7 - math.log(0.5 / 0.7) - 1, rel=1e-5)
    true_kl = (p * (p / q).log()).sum().item()
    assert (p * k3_kl(p.log(), q.log())).sum().item() == pytest.approx(true_kl, rel=1e-5)
