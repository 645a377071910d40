"""What a request can end an engine with: where vLLM's worker fails on a client's value, and our bounds.

The places are read from vLLM's own source: every raise, assert and write into an array of fixed size or type
in the functions that take a request into a batch, of Model Runner V1 and V2, structured output and LoRA.
A place that no row of `COVERED` names fails the gate, as one of a newer vLLM would; so does a row without a
place. Then the bounds, and one beyond each, go through V2's own state classes.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from insitu.errors import InvalidRequest
from insitu.gateway.protocols import bounds
from insitu.gateway.protocols.bounds import check_sampling, check_stops
from insitu.gateway.shared.settings import Limits

_FILES = (
    *("v1/worker/gpu/sample/*.py", "v1/worker/gpu/states.py", "v1/worker/gpu/lora_utils.py"),
    *("v1/worker/gpu/model_runner.py", "v1/worker/gpu_input_batch.py"),
    *("v1/sample/logits_processor/builtin.py", "v1/structured_output/*.py", "lora/worker_manager.py"),
)
_TAKING_IN = (
    *("add_request", "add_requests", "update_state", "grammar_init", "_create_grammar", "compile_grammar"),
    *("_load_adapter", "_apply_adapters", "add_adapter"),
)
_V2, _V1, _GRAMMAR = "v1/worker/gpu/", "v1/worker/gpu_input_batch.py", "v1/structured_output/"
_NEVER_SENT = "never sent: not among the fields that the gateway forwards"
_OWN = "vLLM's own bookkeeping, not a client's value"
_LENGTH = "the prompt and `max_tokens` are checked against the model's length in vLLM's front"
_FLOAT = "a float within the bounds of `check_sampling`"

COVERED: tuple[tuple[str, str, str], ...] = (
    (_V2 + "sample/bad_words.py", "", "bad_words: MOST_BAD_WORDS and MOST_BAD_WORD_BYTES"),
    (_V2 + "sample/logit_bias.py", "llowed", "allowed_token_ids: MOST_ALLOWED_IDS"),
    (_V2 + "sample/logit_bias.py", "bias", "logit_bias: MOST_BIASES, values from -100 to 100"),
    (_V2 + "sample/logit_bias.py", "top", "stop_token_ids: MOST_STOP_IDS, and those of the model"),
    (_V2 + "sample/logit_bias.py", "min_len", "min_tokens: at most max_output_tokens, beyond the prompt"),
    (_V2 + "sample/logit_bias.py", "restore_when", "a flag"),
    (_V2 + "sample/logprob.py", "", _NEVER_SENT),
    (_V2 + "sample/penalties.py", "", _FLOAT),
    (_V2 + "sample/prompt_logprob.py", "", _NEVER_SENT),
    (_V2 + "sample/sampler.py", "needs_logits", "a flag"),
    (_V2 + "sample/states.py", "temperature", _FLOAT),
    (_V2 + "sample/states.py", "top_p", _FLOAT),
    (_V2 + "sample/states.py", "min_p", _FLOAT),
    (_V2 + "sample/states.py", "top_k", "top_k: 32 bits, and vLLM cuts it to the vocabulary"),
    (_V2 + "sample/states.py", "seed", "seed: SEEDS, 64 bits"),
    (_V2 + "sample/states.py", "num_logprobs", "set by the gateway: max_top_logprobs"),
    (_V2 + "sample/thinking_budget.py", "", "thinking_token_budget: at most max_output_tokens"),
    (_V2 + "sample/trace_replay.py", "", _NEVER_SENT),
    (_V2 + "states.py", "", _LENGTH),
    (_V2 + "lora_utils.py", "", _OWN),
    (_V2 + "model_runner.py", "", _OWN),
    (_V1, "top_p", _FLOAT),
    (_V1, "top_k", "top_k: 32 bits, and vLLM cuts it to the vocabulary"),
    (_V1, "penalties_cpu", _FLOAT),
    (_V1, "temperature_cpu", _FLOAT),
    (_V1, "generators", "seed: SEEDS, 64 bits"),
    (_V1, "num_logprobs", "set by the gateway: max_top_logprobs"),
    (_V1, "logprob_token_ids", _NEVER_SENT),
    (_V1, "allowed_token_ids", "allowed_token_ids: checked against the vocabulary in vLLM's front"),
    (_V1, "bad_words_token_ids", "bad_words: checked against the vocabulary in vLLM's front"),
    (_V1, "token_ids_cpu", _LENGTH),
    (_V1, "is_token_ids", _LENGTH),
    (_V1, "pooling", _OWN),
    (_V1, "Unrecognized request type", _OWN),
    (_V1, "lora", _OWN),
    (_V1, "req_", _OWN),
    (_V1, "num_prompt_tokens", _OWN),
    (_V1, "num_tokens_no_spec", _OWN),
    (_V1, "num_computed_tokens_cpu", _OWN),
    (_V1, "num_accepted_tokens_cpu", _OWN),
    (_V1, "replayssm_decode_base", _OWN),
    (_V1, "logits_processing_needs_token_ids", "a flag"),
    ("v1/sample/logits_processor/builtin.py", "min_p", _FLOAT),
    (_GRAMMAR, "request.sampling_params", _OWN),
    (_GRAMMAR, "struct_request", _OWN),
    (_GRAMMAR, "self.backend", _OWN),
    (_GRAMMAR, "backend", "the engine's own setting"),
    (_GRAMMAR, "raise", "vLLM fails the request, not the engine: test_a_grammar_that_fails_fails_alone"),
    ("lora/worker_manager.py", "", "adapters are loaded by the supervisor, never by a client"),
)


@dataclass(frozen=True)
class Place:
    """A statement that could fail on a request."""

    file: str
    source: str


def places() -> Iterator[Place]:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    root = Path(found.origin).parent
    for pattern in _FILES:
        for path in sorted(root.glob(pattern)):
            for function in ast.walk(ast.parse(path.read_text())):
                if isinstance(function, ast.FunctionDef) and function.name in _TAKING_IN:
                    for node in ast.walk(function):
                        if source := _may_fail(node):
                            yield Place(str(path.relative_to(root)), source)


def _may_fail(node: ast.AST) -> str:
    """Return what is written to, asserted or raised; "" for a statement of another kind."""
    if isinstance(node, ast.Assign):
        return ", ".join(ast.unparse(each.value) for each in node.targets if isinstance(each, ast.Subscript))
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "stage_write"
    ):
        return ast.unparse(node.func.value)
    return ast.unparse(node) if isinstance(node, ast.Raise | ast.Assert) else ""


def test_every_place_has_its_bound() -> None:
    found = list(places())
    assert len(found) > 80, "vLLM has moved its code: look where"
    used: set[tuple[str, str]] = set()
    bare: list[Place] = []
    for place in found:
        row = next(
            (
                (file, part)
                for file, part, _ in COVERED
                if place.file.startswith(file) and part in place.source
            ),
            None,
        )
        if row is None:
            bare.append(place)
        else:
            used.add(row)
    print(f"gate death: {len(found)} places in vLLM, {len(bare)} without a bound")
    assert not bare, "an engine could end here: bound it, then name the bound"
    assert used == {(file, part) for file, part, _ in COVERED}, "a row that covers nothing"


class _Staged:
    def stage_write(self, _row: int, _start: int, values: Any) -> None:
        np.asarray(list(values), dtype=np.int64)


def _array(dtype: Any) -> Any:
    return SimpleNamespace(np=np.zeros(1, dtype))


def _take_in(params: Any) -> None:
    """Give sampling parameters to the state classes of Model Runner V2, with arrays of their own types."""
    from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
    from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
    from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
    from vllm.v1.worker.gpu.sample.states import SamplingStates
    from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState

    bias: Any = SimpleNamespace(
        prompt_len_np=np.array([5]),
        use_logit_bias=np.zeros(1, bool),
        allowed_token_ids=_Staged(),
        logit_bias_token_ids=_Staged(),
        logit_bias=_Staged(),
        stop_token_ids=_Staged(),
        **{
            name: _array(np.int32)
            for name in (
                *("num_allowed_token_ids", "num_logit_bias", "min_lens", "num_stop_token_ids"),
                "restore_when_all_masked",
            )
        },
    )
    LogitBiasState.add_request(bias, 0, params)
    words: Any = SimpleNamespace(
        num_bad_words=_array(np.int32), bad_word_token_ids=_Staged(), bad_word_offsets=_Staged()
    )
    BadWordsState.add_request(words, 0, params)
    states: Any = SimpleNamespace(
        vocab_size=49_152,
        temperature=_array(np.float32),
        top_p=_array(np.float32),
        min_p=_array(np.float32),
        top_k=_array(np.int32),
        seeds=_array(np.int64),
        seeds_set=np.zeros(1, bool),
        num_logprobs=np.zeros(1, np.int32),
    )
    SamplingStates.add_request(states, 0, params)
    penalties: Any = SimpleNamespace(
        repetition_penalty=_array(np.float32),
        frequency_penalty=_array(np.float32),
        presence_penalty=_array(np.float32),
        use_penalty=np.zeros(1, bool),
        _new_penalties_reqs=[],
    )
    PenaltiesState.add_request(penalties, 0, params)
    budget: Any = SimpleNamespace(
        enabled=True,
        use_thinking_budget=np.zeros(1, bool),
        thinking_token_budget=_array(np.int32),
        _reset_reqs=[],
        _budget_dirty=False,
    )
    ThinkingBudgetState.add_request(budget, 0, params)


class _OneTokenAByte:
    """The most tokens that a tokenizer makes of a text: one a byte, and one for the beginning."""

    max_token_id = 49_151

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [1, *text.strip().encode()]


def _words(num_bytes: int) -> list[str]:
    return ["x" * 63] * (num_bytes // 64) + (["x" * (num_bytes % 64 - 1)] if num_bytes % 64 > 1 else [])


MOST_TOKENS = Limits().max_output_tokens
AT_THE_BOUND: dict[str, dict[str, Any]] = {
    "biases": {"logit_bias": {str(token): 100 for token in range(bounds.MOST_BIASES)}},
    "allowed ids": {"allowed_token_ids": list(range(bounds.MOST_ALLOWED_IDS))},
    "stop ids": {"min_tokens": 1, "stop_token_ids": list(range(10, 10 + bounds.MOST_STOP_IDS))},
    "bad words": {"bad_words": [f"{place:x}" for place in range(bounds.MOST_BAD_WORDS)]},
    "bytes of bad words": {"bad_words": _words(bounds.MOST_BAD_WORD_BYTES)},
    "min_tokens": {"min_tokens": MOST_TOKENS},
    "thinking budget": {"thinking_token_budget": MOST_TOKENS},
    "top_k": {"top_k": 2**31 - 1},
    "least seed": {"seed": -(2**63)},
    "greatest seed": {"seed": 2**63 - 1},
    "temperature": {"temperature": 2},
    "repetition penalty": {"repetition_penalty": 100},
    "least repetition penalty": {"repetition_penalty": 0.01},
    "presence penalty": {"presence_penalty": -2},
}
BEYOND: dict[str, dict[str, Any]] = {
    "biases": {"logit_bias": {str(token): 1 for token in range(bounds.MOST_BIASES + 1)}},
    "allowed ids": {"allowed_token_ids": list(range(bounds.MOST_ALLOWED_IDS + 1))},
    "stop ids": {"min_tokens": 1, "stop_token_ids": list(range(bounds.MOST_STOP_IDS + 1))},
    "bad words": {"bad_words": ["x"] * (bounds.MOST_BAD_WORDS + 1)},
    "bytes of bad words": {"bad_words": _words(bounds.MOST_BAD_WORD_BYTES + 2)},
    "min_tokens": {"min_tokens": MOST_TOKENS + 1},
    "thinking budget": {"thinking_token_budget": MOST_TOKENS + 1},
    "top_k": {"top_k": 2**31},
    "least seed": {"seed": -(2**63) - 1},
    "greatest seed": {"seed": 2**63},
    "temperature": {"temperature": 1e308},
    "repetition penalty": {"repetition_penalty": 1e308},
    "least repetition penalty": {"repetition_penalty": 1e-300},
    "presence penalty": {"presence_penalty": -2.1},
}


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("given", AT_THE_BOUND.values(), ids=AT_THE_BOUND)
def test_the_worker_takes_what_the_bounds_let_through(given: dict[str, Any]) -> None:
    from vllm.sampling_params import SamplingParams

    check_sampling(given, Limits())
    sent = dict(given)
    if "logit_bias" in sent:
        sent["logit_bias"] = {int(token): float(bias) for token, bias in sent["logit_bias"].items()}
    params = SamplingParams(max_tokens=MOST_TOKENS, **sent)
    params.update_from_generation_config({}, 2)
    tokenizer: Any = _OneTokenAByte()
    params.update_from_tokenizer(tokenizer)
    _take_in(params)


@pytest.mark.parametrize("given", BEYOND.values(), ids=BEYOND)
def test_one_more_is_rejected(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        check_sampling(given, Limits())


def test_stops() -> None:
    from vllm import envs

    assert envs.VLLM_MAX_STOP_STRINGS == bounds.MOST_STOPS
    assert check_stops(["x" * (bounds.MOST_STOP_BYTES // 4)] * 4)
    for stops in (["x"] * 5, ["x" * bounds.MOST_STOP_BYTES, "x"], [""], [1], 1):
        with pytest.raises(InvalidRequest):
            check_stops(stops)


@pytest.mark.parametrize(
    "given",
    [
        {"logit_bias": {str(token): 1.0 for token in range(1025)}},
        {"allowed_token_ids": list(range(1025))},
        {"min_tokens": 1, "stop_token_ids": list(range(129))},
    ],
    ids=["biases", "allowed ids", "stop ids"],
)
def test_without_the_bounds_the_worker_fails(given: dict[str, Any]) -> None:
    """The engine would end: vLLM's front accepts each of these."""
    from vllm.sampling_params import SamplingParams

    sent = dict(given)
    if "logit_bias" in sent:
        sent["logit_bias"] = {int(token): bias for token, bias in sent["logit_bias"].items()}
    params = SamplingParams(max_tokens=16, **sent)
    params.update_from_generation_config({}, 2)
    with pytest.raises((ValueError, OverflowError)):
        _take_in(params)


def test_a_grammar_that_fails_fails_alone() -> None:
    """vLLM keeps what a grammar raised beside its request, and its scheduler ends that request alone."""
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output.request import StructuredOutputRequest

    failed: Future[Any] = Future()
    failed.set_exception(ValueError("no such grammar"))
    request = StructuredOutputRequest(params=StructuredOutputsParams(json="{}"))
    request.grammar = failed
    assert isinstance(request.grammar, ValueError)
    assert "grammar_compile_error_reqs.add" in inspect.getsource(Scheduler)
