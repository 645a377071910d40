from __future__ import annotations

import pytest
import torch
from torch import Tensor

from insitu.training.model import logprobs
from insitu.training.model.shaping import PLAIN, LogitShaping

HIDDEN, VOCABULARY, TOKENS = 5, 11, 8


def plain(
    hidden: Tensor,
    head: torch.nn.Linear,
    target: Tensor,
    temperature: Tensor | None,
    shaping: LogitShaping = PLAIN,
) -> tuple[Tensor, Tensor]:
    """The head as torch itself computes and differentiates it, all positions at once."""
    logits = head(hidden) * shaping.scale
    if shaping.softcap is not None:
        logits = shaping.softcap * (logits / shaping.softcap).tanh()
    if temperature is not None:
        logits = logits / temperature[:, None]
    reference = torch.log_softmax(logits.float(), -1)
    return reference.gather(-1, target[:, None]).squeeze(-1), -(reference.exp() * reference).sum(-1)


def frozen_head(*, bias: bool = False) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(HIDDEN, VOCABULARY, bias=bias).requires_grad_(False)


@pytest.mark.parametrize("temperature", [None, torch.linspace(0.2, 3.0, TOKENS)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bonus", [0.0, 0.3])
@pytest.mark.parametrize(
    "shaping", [PLAIN, LogitShaping(0.3), LogitShaping(softcap=1.5), LogitShaping(2.0, 0.7)]
)
@pytest.mark.parametrize("tokens_per_chunk", [1, 3, TOKENS])
def test_value_and_gradient_equal_the_plain_head(
    tokens_per_chunk: int,
    bonus: float,
    bias: bool,
    temperature: Tensor | None,
    shaping: LogitShaping,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logprobs, "_CHUNK_BYTES", tokens_per_chunk * VOCABULARY * 8)
    head, target, weight = frozen_head(bias=bias), torch.randint(VOCABULARY, (TOKENS,)), torch.randn(TOKENS)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    found: list[list[Tensor]] = []
    for chosen, entropy in (
        logprobs.token_logprobs(hidden, head, target, temperature, shaping),
        plain(hidden, head, target, temperature, shaping),
    ):
        (grad,) = torch.autograd.grad((chosen * weight - bonus * entropy).sum(), hidden)
        found.append([chosen, entropy, grad])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_no_gradient_is_computed_when_none_is_asked_for() -> None:
    head, target = frozen_head(), torch.randint(VOCABULARY, (TOKENS,))
    chosen, _ = logprobs.token_logprobs(torch.randn(TOKENS, HIDDEN), head, target)
    assert not chosen.requires_grad


def test_a_head_that_learns_is_rejected() -> None:
    head = frozen_head().requires_grad_(True)
    with pytest.raises(ValueError, match="frozen"):
        logprobs.token_logprobs(torch.randn(1, HIDDEN), head, torch.zeros(1, dtype=torch.long))


def test_half_precision_stays_within_its_rounding() -> None:
    head, target = frozen_head().bfloat16(), torch.randint(VOCABULARY, (TOKENS,))
    hidden = torch.randn(TOKENS, HIDDEN).bfloat16().requires_grad_()
    chosen, _ = logprobs.token_logprobs(hidden, head, target)
    (grad,) = torch.autograd.grad(chosen.sum(), hidden)
    expected, _ = plain(exact := hidden.detach().float().requires_grad_(), head.float(), target, None)
    (expected_grad,) = torch.autograd.grad(expected.sum(), exact)
    assert chosen.dtype == torch.float32
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(chosen, expected, rtol=0, atol=0.02)
    torch.testing.assert_close(grad.float(), expected_grad, rtol=0, atol=0.02)
