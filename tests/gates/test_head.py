"""The chunked output head against a plain one: the same values, bounded memory, no slower."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from insitu.training.footprint.live_bytes import LiveBytes
from insitu.training.model.logprobs import float32_logits, token_logprobs
from tests.gates.gate import gate

GIB = 2**30
VOCABULARY = 152064
Head = Callable[[Tensor, nn.Linear, Tensor], tuple[Tensor, Tensor]]


def plain(hidden: Tensor, head: nn.Linear, target: Tensor) -> tuple[Tensor, Tensor]:
    """The head as torch computes and differentiates it, all positions at once."""
    log_probs = torch.log_softmax(head(hidden), -1)
    return log_probs.gather(-1, target[:, None]).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)


def plain_without_bonus(hidden: Tensor, head: nn.Linear, target: Tensor) -> tuple[Tensor, Tensor]:
    """The same for training: in float32, with an entropy that is a metric only and costs no gradient."""
    log_probs = torch.log_softmax(head(hidden).float(), -1)
    fixed = log_probs.detach()
    return log_probs.gather(-1, target[:, None]).squeeze(-1), -(fixed.exp() * fixed).sum(-1)


def frozen_head(hidden_size: int, dtype: torch.dtype, vocabulary: int = VOCABULARY) -> nn.Linear:
    return nn.Linear(hidden_size, vocabulary, bias=False, dtype=dtype).requires_grad_(False)


@pytest.mark.timeout(120)
def test_head_equals_the_plain_one() -> None:
    """At a real vocabulary and over several chunks. The plain one runs in float64: the difference is ours.

    Values are compared by their size. Gradients of a token are below 1, and are compared as they are: a plain
    head in float32 differs from float64 by as much.
    """
    torch.manual_seed(0)
    head, exact_head = frozen_head(64, torch.float32), frozen_head(64, torch.float64)
    exact_head.load_state_dict(head.state_dict())
    hidden = torch.randn(500, 64, requires_grad=True)
    exact = hidden.detach().double().requires_grad_()
    target, weight = torch.randint(VOCABULARY, (500,)), torch.randn(500)
    ours, theirs = token_logprobs(hidden, head, target), plain(exact, exact_head, target)
    for (chosen, entropy), inputs in ((ours, hidden), (theirs, exact)):
        (chosen * weight - 0.1 * entropy).sum().backward()
        assert inputs.grad is not None
    for name, found, expected in zip(
        ("value", "entropy", "gradient"), (*ours, hidden.grad), (*theirs, exact.grad), strict=True
    ):
        difference = (found - expected).abs().max() / expected.abs().max().clamp(min=1)
        gate(f"head-{name}", difference.item(), 1e-6, "relative to the largest, or to 1")


@pytest.mark.parametrize("bonus", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head_memory_does_not_grow_with_tokens(dtype: torch.dtype, bonus: float) -> None:
    """Beyond the inputs and the one gradient that they get; with and without an entropy bonus."""
    most = max(_bytes_beyond_gradient(num_tokens, dtype, bonus) for num_tokens in (64, 1024, 8192, 40960))
    name = str(dtype).removeprefix("torch.") + ("-bonus" if bonus else "")
    gate(f"head-memory-{name}", most / GIB, 0.6, "GiB")


def _bytes_beyond_gradient(num_tokens: int, dtype: torch.dtype, bonus: float) -> int:
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        head = frozen_head(3584, dtype)
        hidden = torch.randn(num_tokens, 3584, dtype=dtype, requires_grad=True)
        target = torch.zeros(num_tokens, dtype=torch.long)
        before = live.now
        chosen, entropy = token_logprobs(hidden, head, target)
        loss = chosen.sum() + bonus * entropy.sum() if bonus else chosen.sum()
        loss.backward()
        assert hidden.grad is not None
    return live.peak - before - hidden.untyped_storage().nbytes()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_a_gpu_never_have_sixteen_bits(dtype: torch.dtype, bias: bool) -> None:
    """On fake tensors of a GPU: nothing of the logits' shape is computed in another precision."""
    with FakeTensorMode(), _Results() as results:
        hidden, weight = (torch.empty(count, 64, device="cuda", dtype=dtype) for count in (8, VOCABULARY))
        float32_logits(hidden, weight, torch.empty(VOCABULARY, device="cuda", dtype=dtype) if bias else None)
    assert {made for shape, made in results.seen if shape == (8, VOCABULARY)} == {torch.float32}
    name = str(dtype).removeprefix("torch.") + ("-bias" if bias else "")
    print(f"gate head-logits-{name}: in float32 only ok")


class _Results(TorchDispatchMode):
    """Notes the shape and precision of every result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[int, ...], torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.seen.append((tuple(result.shape), result.dtype))
        return result


@pytest.mark.alone
@pytest.mark.timeout(180)
def test_head_costs_no_more_than_the_plain_one() -> None:
    """In turns, in one process, on one thread; what is compared is the median over the rounds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            seconds = _alternating_seconds(dtype, num_rounds=3)
            name = str(dtype).removeprefix("torch.")
            gate(f"head-time-{name}", seconds["chunked"] / seconds["plain"], 1.1, "x plain")
    finally:
        torch.set_num_threads(before)


def _alternating_seconds(dtype: torch.dtype, num_rounds: int) -> dict[str, float]:
    head = frozen_head(512, dtype)
    hidden = torch.randn(450, 512, dtype=dtype, requires_grad=True)
    target = torch.randint(VOCABULARY, (450,))
    sides: dict[str, Head] = {"chunked": token_logprobs, "plain": plain_without_bonus}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(num_rounds + 1):
        for name, head_of in sides.items():
            started = time.process_time()
            chosen, _ = head_of(hidden, head, target)
            chosen.sum().backward()
            taken[name].append(time.process_time() - started)
    return {name: statistics.median(times[1:]) for name, times in taken.items()}
