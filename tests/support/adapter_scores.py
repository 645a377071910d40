"""Recorded calls scored again with plain Transformers and PEFT, as a witness that shares no code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from insitu.testing.models import tiny
from insitu.types import ModelCall


def score_gaps(calls: list[ModelCall], adapter: Path | None) -> list[float]:
    """The largest |Δlogprob| of each call under one version's weights."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    gaps: list[float] = []
    with torch.no_grad():
        for call in calls:
            ids = torch.tensor([call.prompt_ids + call.output_ids])
            logprobs = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
            own = logprobs.gather(1, ids[0, 1:, None])[len(call.prompt_ids) - 1 :, 0]
            gaps.append((own - torch.tensor(call.logprobs)).abs().max().item())
    return gaps
