"""vLLM's own sampler records the distribution that the trainer scores: after temperature; greedy at 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from insitu.training.model.logprobs import token_logprobs
from insitu.training.sampling import temperature_of

pytestmark = pytest.mark.timeout(120)
pytest.importorskip("vllm")


def sampled(logits: torch.Tensor, temperatures: list[float], mode: str, top_p: float | None) -> Any:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    count = len(temperatures)
    metadata = SamplingMetadata(
        temperature=torch.tensor(temperatures),
        all_greedy=not any(temperatures),
        all_random=all(temperatures),
        top_p=None if top_p is None else torch.full((count,), top_p),
        top_k=None,
        generators={},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(count),
        presence_penalties=torch.zeros(count),
        repetition_penalties=torch.ones(count),
        output_token_ids=[[] for _ in range(count)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    return Sampler(mode)(logits.clone(), metadata)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperatures", [[0.5, 1.0, 1.7, 0.01], [0.5, 0.0, 1.7, 0.0], [0.0] * 4])
def test_the_engine_records_what_the_trainer_scores(temperatures: list[float]) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(4, 16)
    head = torch.nn.Linear(16, 97, bias=False).requires_grad_(False)
    out = sampled(head(hidden), temperatures, "processed_logprobs", None)
    ids, recorded = out.sampled_token_ids[:, 0].long(), out.logprobs_tensors.logprobs[:, 0]
    at = torch.tensor([temperature_of({"temperature": t}) for t in temperatures])
    scored, _ = token_logprobs(hidden, head, ids, at)
    assert (scored - recorded).abs().max() < 1e-5
    plain, _ = token_logprobs(hidden, head, ids)
    raw = sampled(head(hidden), temperatures, "raw_logprobs", None)
    if any(t not in (0.0, 1.0) for t in temperatures):
        assert (plain - recorded).abs().max() > 1e-2, "a trainer at temperature 1 would compare two things"
        again, _ = token_logprobs(hidden, head, raw.sampled_token_ids[:, 0].long())
        assert (again - raw.logprobs_tensors.logprobs[:, 0]).abs().max() < 1e-5, "vLLM's default is raw"


def test_truncation_is_in_the_record_and_the_weight_corrects_for_it() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(4, 16), torch.nn.Linear(16, 97, bias=False).requires_grad_(False)
    out = sampled(head(hidden), [1.0] * 4, "processed_logprobs", 0.5)
    ids, recorded = out.sampled_token_ids[:, 0].long(), out.logprobs_tensors.logprobs[:, 0]
    scored, _ = token_logprobs(hidden, head, ids)
    # The weight is the probability of the nucleus: what truncation added to each kept token is taken back.
    assert ((scored - recorded).exp() < 1.0).all()
    assert ((scored - recorded).exp() >= 0.5 - 1e-4).all()
