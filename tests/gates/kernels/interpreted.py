"""vLLM's kernels for GPUs, computed by Triton's interpreter: `python -m tests.gates.kernels.interpreted`.

It prints as JSON how far they are from what they should compute: the V2 sampler's log-probabilities and
draws, and an adapter's shrink and expand over tokens of two adapters and of none.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import json
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.backends import backends

_VOCABULARY, _DRAWS = 64, 600
_TOKENS, _HIDDEN, _RANK = 24, 128, 16


def main() -> None:
    """Print every figure."""
    # vLLM asks Triton for an active driver before it takes Triton's kernels.
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))  # type: ignore[assignment]
    torch.manual_seed(0)
    print(json.dumps(_logprobs() | _draws() | _adapters()))


def _logprobs() -> dict[str, float]:
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

    logits_tv, ids_t = torch.randn(3, 3000) * 4, torch.tensor([5, 2999, 17])
    scores: Any = compute_topk_scores(logits_tv, 2, ids_t)
    expected_t = logits_tv.log_softmax(-1).gather(-1, ids_t[:, None])[:, 0]
    ranks = [int((row >= row[index]).sum()) for row, index in zip(logits_tv, ids_t, strict=True)]
    return {
        "logprobs": float((scores.logprobs[:, 0] - expected_t).abs().max()),
        "wrong_ranks": sum(a != b for a, b in zip(scores.selected_token_ranks.tolist(), ranks, strict=True)),
    }


def _draws() -> dict[str, float]:
    """Return the total variation of the sampler's draws from the softmax, and that of torch's own draws."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    probability_v = torch.softmax(2 * torch.randn(_VOCABULARY), -1)
    drawn: Any = gumbel_sample(
        probability_v.log().repeat(_DRAWS, 1),
        torch.arange(_DRAWS, dtype=torch.int32),
        torch.ones(_DRAWS),
        7919 * torch.arange(_DRAWS, dtype=torch.int64) + 1,
        torch.zeros(_DRAWS, dtype=torch.int64),
        apply_temperature=False,
        is_drafting=False,
        use_fp64=False,
    )
    own = torch.multinomial(probability_v, _DRAWS, replacement=True)
    return {
        "draws": _total_variation(drawn.flatten(), probability_v),
        "multinomial": _total_variation(own, probability_v),
    }


def _total_variation(drawn: Tensor, probability_v: Tensor) -> float:
    share_v = torch.bincount(drawn, minlength=_VOCABULARY).float() / len(drawn)
    return float((share_v - probability_v).abs().sum() / 2)


def _adapters() -> dict[str, float]:
    """Return the errors of shrink and expand, relative to the largest value.

    In float16: the interpreter multiplies no matrices of bfloat16.
    """
    from vllm.lora.ops.triton_ops.lora_expand_op import _lora_expand
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
    from vllm.lora.ops.triton_ops.lora_shrink_op import _lora_shrink

    slot_t = torch.tensor([0, 0, 1, -1, 1, 0] * (_TOKENS // 6))
    meta: Any = LoRAKernelMeta.make(max_loras=2, max_num_tokens=_TOKENS, device="cpu")
    meta.prepare_tensors(slot_t)
    arguments = meta.meta_args(_TOKENS, False)
    input_th = torch.randn(_TOKENS, _HIDDEN, dtype=torch.float16)
    a_rh = [torch.randn(2, _RANK, _HIDDEN, dtype=torch.float16) for _ in range(2)]
    b_hr = [torch.randn(2, _HIDDEN, _RANK, dtype=torch.float16) for _ in range(2)]
    small_tr = torch.zeros(2, _TOKENS, _RANK)
    _lora_shrink(input_th, a_rh, small_tr, *arguments, scaling=0.5)
    base_th = torch.randn(_TOKENS, 2 * _HIDDEN, dtype=torch.float16)
    output_th = base_th.clone()
    _lora_expand(small_tr, b_hr, output_th, *arguments, offset_start=0, add_inputs=True)
    expected_tr, expected_th = torch.zeros_like(small_tr), base_th.float()
    for token, slot in enumerate(slot_t.tolist()):
        if slot < 0:
            continue
        for part in range(2):
            small_r = 0.5 * (a_rh[part][slot].float() @ input_th[token].float())
            expected_tr[part, token] = small_r
            here = slice(part * _HIDDEN, (part + 1) * _HIDDEN)
            expected_th[token, here] += b_hr[part][slot].float() @ small_r
    alone = [token for token, slot in enumerate(slot_t.tolist()) if slot < 0]
    return {
        "shrink": _relative(small_tr, expected_tr),
        "expand": _relative(output_th.float(), expected_th),
        "touched_without_adapter": float((output_th[alone] - base_th[alone]).abs().max()),
    }


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


if __name__ == "__main__":
    main()
