"""Engine arguments of a registration: honoured, or refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from insitu.backend.plan.devices.machine import remembered_tokens
from insitu.backend.plan.engine import (
    WHOLE_PINNED,
    EngineSettings,
    allocator_settings,
    allowed_lora_rank,
    apply_arguments,
    check_targets,
    difference,
)
from insitu.errors import CannotHonour

CPU = EngineSettings("dir", "tiny", "cpu", "float32", "merged")
CUDA = EngineSettings("dir", "tiny", "cuda", "bfloat16", "adapter")


def test_arguments_are_applied() -> None:
    wanted = apply_arguments(
        CUDA, {"gpu_memory_utilization": 0.7, "tensor_parallel_size": 2}, {"max_seq_length": 4096}, 64
    )
    assert (wanted.gpu_memory_utilization, wanted.tensor_parallel_size) == (0.7, 2)
    assert (wanted.max_model_len, wanted.max_lora_rank) == (4096, 64)
    command = wanted.command(9)
    assert command[command.index("--max-model-len") + 1] == "4096"
    assert command[command.index("--gpu-memory-utilization") + 1] == "0.7"
    assert command[command.index("--max-lora-rank") + 1] == "64"


def test_parsers() -> None:
    wanted = apply_arguments(CPU, {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}, {}, 8)
    command = wanted.command(9)
    assert command[command.index("--tool-call-parser") - 1] == "--enable-auto-tool-choice"
    assert command[command.index("--tool-call-parser") + 1] == "hermes"
    assert command[command.index("--reasoning-parser") + 1] == "qwen3"
    assert "--enable-auto-tool-choice" not in CPU.command(9)


def test_no_arguments_change_nothing() -> None:
    assert apply_arguments(CPU, {}, {}, 8) == CPU


@pytest.mark.parametrize(
    ("engine_args", "init_args", "said"),
    [
        ({"gpu_memory_utilization": 0.9}, {}, "runs on a CPU"),
        ({"tensor_parallel_size": 2}, {}, "runs on a CPU"),
        ({"tensor_paralel_size": 1}, {}, "did you mean tensor_parallel_size"),
        ({"enforce_eager": "yes"}, {}, "neither true nor false"),
        ({"max_num_seqs": 0}, {}, "not a positive whole number"),
        ({"tool_call_parser": "--host"}, {}, "not the name of a parser"),
        ({"reasoning_parser": 3}, {}, "not the name of a parser"),
        ({}, {"max_seq_length": -1}, "not a positive whole number"),
        ({}, {"load_in_4bit": True}, "valid: max_seq_length"),
    ],
)
def test_what_cannot_be_honoured_is_refused(engine_args: dict, init_args: dict, said: str) -> None:
    with pytest.raises(CannotHonour) as refused:
        apply_arguments(CPU, engine_args, init_args, 8)
    assert said in str(refused.value)


def test_difference_is_for_people() -> None:
    wanted = apply_arguments(CPU, {"max_num_seqs": 8}, {"max_seq_length": 4096}, 8)
    assert difference(CPU, wanted) == "max_model_len 2048 → 4096, max_num_seqs 64 → 8"


def test_lora_ranks() -> None:
    assert [allowed_lora_rank(rank) for rank in (1, 2, 8, 9, 32, 500)] == [1, 8, 8, 16, 32, 512]
    with pytest.raises(CannotHonour):
        allowed_lora_rank(513)


def test_engine_listens_on_loopback_and_takes_no_sampling_defaults() -> None:
    command = CPU.command(1234)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--generation-config") + 1] == "vllm"
    assert command[command.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert command[command.index("--load-format") + 1] == "safetensors", "no pickle is loaded"
    assert "--enable-lora" not in command
    assert "--enable-lora" in CUDA.command(1)


def test_a_sleeping_engine_holds_no_more_than_its_weights() -> None:
    sleeping = replace(CUDA, sleep=True, enforce_eager=False)
    assert "--sleep-mode-offload-cudagraph" in sleeping.command(1)
    assert "--sleep-mode-offload-cudagraph" not in replace(sleeping, enforce_eager=True).command(1)
    assert "pinned_max_round_threshold_mb:1" in sleeping.environment()["PYTORCH_ALLOC_CONF"]
    assert "PYTORCH_ALLOC_CONF" not in CPU.environment()


def test_the_allocator_keeps_what_the_user_set() -> None:
    ours = ("expandable_segments:True", WHOLE_PINNED)
    assert set(allocator_settings(*ours, environment={}).values()) == {",".join(ours)}
    theirs = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False,max_split_size_mb:512"}
    assert allocator_settings(*ours, environment=theirs)["PYTORCH_ALLOC_CONF"] == (
        "expandable_segments:False,max_split_size_mb:512,pinned_max_round_threshold_mb:1"
    )


def test_torch_knows_the_allocator_s_settings() -> None:
    torch = pytest.importorskip("torch")
    library = (Path(torch.__path__[0]) / "lib" / "libc10.so").read_bytes()
    for setting in ("expandable_segments:True", WHOLE_PINNED):
        assert setting.partition(":")[0].encode() in library, setting


def test_gateways_remember_ids_in_a_64th_of_the_ram() -> None:
    assert remembered_tokens(64 * 2**30, 1) == 256 * 2**20
    assert remembered_tokens(64 * 2**30, 4) == 64 * 2**20
    assert remembered_tokens(2**30, 4) == 32 * 2**20


def test_layers_that_are_not_served_are_rejected_before_the_first_step() -> None:
    check_targets(CUDA, ["q_proj", "down_proj"])
    with pytest.raises(CannotHonour, match="would not serve adapters on fc1 of tiny") as raised:
        check_targets(CUDA, ["fc1", "q_proj"])
    assert raised.value.hint == "name the others in lora.target_modules: q_proj"
    check_targets(CPU, ["fc1"])  # merged weights have every layer
