"""Settings of a vLLM server, those that a registration may override, and its command line."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from insitu.errors import CannotHonour
from insitu.wire.engine import MAX_LORAS
from insitu.wire.values import ENGINE_ARGUMENTS, INIT_ARGUMENTS, PARSERS

Device = Literal["cpu", "cuda"]
Dtype = Literal["bfloat16", "float16", "float32"]
Publication = Literal["adapter", "merged"]

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_LORA_MODULES = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("qkv_proj", "gate_up_proj"),
)
"""Modules that the engine wraps in any model. vLLM would take an adapter of others and compute without them:
see `insitu.backend.in_engine`."""
_CUDA_ONLY = ("gpu_memory_utilization",)
CPU_KV_CACHE_GIB = 2
SEED_GUARD_VLLM = "0.32.0"
"""The vLLM that needs `_WHOLE_PROMPTS`; tests/integration/test_seeded_calls.py tells when it can go."""
_WHOLE_PROMPTS = ("--no-enable-chunked-prefill",)
"""When vLLM prefills the prompt of a seeded call in chunks, it rewinds the call's random generator after each
chunk. A CPU generator has no offset to rewind, and the exception kills the engine for all calls."""
_CPU_LORAS = 32
"""Adapters that an engine keeps in the machine's memory: those beyond it are read from the disk again."""
WHOLE_PINNED = "pinned_max_round_threshold_mb:1"
"""Else torch rounds pinned memory up to a power of two, and a sleeping 7B takes 26.8 instead of 14.2 GiB."""
_FLOAT32_HEAD = ("--hf-overrides", '{"head_dtype": "float32"}')
"""Keeps the logits of 16-bit weights in float32, as the trainer does. Only a GPU needs no copy for it."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Everything that determines an engine's behaviour; engines with equal settings are interchangeable."""

    model: str
    """Directory or hub id."""
    served_name: str
    device: Device
    dtype: Dtype
    publication: Publication
    sleep: bool = False
    """Free the engine's memory for the trainer while a step trains (CUDA only)."""
    max_model_len: int = 2048
    max_num_seqs: int = 64
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = True
    max_lora_rank: int = 16
    max_loras: int = MAX_LORAS
    lora_modules: tuple[str, ...] | None = None
    """Modules that adapters of the model may be on; None if its family is not known."""
    hybrid: bool = False
    """True if layers of the model keep a state instead of keys and values."""
    micro_batch_tokens: int | None = None
    """The trainer's token budget, if a registration sets it: the trainer starts and stops with the engine."""
    step_seconds: int | None = None
    """This deadline and the next two, if a registration sets them."""
    score_seconds: int | None = None
    publish_seconds: int | None = None
    kv_cache_gib: int = CPU_KV_CACHE_GIB
    """Memory for the KV cache on a CPU."""
    block_size: int | None = None
    """Tokens per KV-cache block; None leaves it to vLLM."""
    tool_call_parser: str | None = None
    """vLLM's parser for the model's tool calls; without one, calls with tools to choose from are rejected."""
    reasoning_parser: str | None = None

    @property
    def wrapped_modules(self) -> list[str]:
        """The modules of which the engine serves adapters, as far as the model has them."""
        return sorted({*_LORA_MODULES, *(self.lora_modules or ())})

    def command(self, port: int, address: str = "127.0.0.1") -> list[str]:
        """Return the server's command line. Behind the gateway it listens on loopback, or for other nodes."""
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", self.model, "--served-model-name", self.served_name),
            *("--host", address, "--port", str(port)),
            *("--dtype", self.dtype, "--max-model-len", str(self.max_model_len)),
            *("--max-num-seqs", str(self.max_num_seqs)),
            *("--tensor-parallel-size", str(self.tensor_parallel_size)),
            # Sampling defaults must come from the gateway, never from the model's files.
            *("--generation-config", "vllm", "--enable-scale-out", "--disable-uvicorn-access-log"),
            # By itself vLLM falls back to *.bin and *.pt, which are pickles.
            *("--load-format", "safetensors"),
            # Record the distribution that was sampled from: after temperature, penalties and truncation.
            *("--logprobs-mode", "processed_logprobs"),
        ]
        if self.enforce_eager:
            command.append("--enforce-eager")
        if self.block_size is not None:
            command += ["--block-size", str(self.block_size)]
        if self.device == "cpu":
            command += _WHOLE_PROMPTS
            if self.hybrid:  # vLLM shares the states of prompts in chunks alone
                command.append("--no-enable-prefix-caching")
        elif self.dtype != "float32":
            command += _FLOAT32_HEAD
        if self.gpu_memory_utilization is not None:
            command += ["--gpu-memory-utilization", str(self.gpu_memory_utilization)]
        if self.tool_call_parser is not None:
            command += ["--enable-auto-tool-choice", "--tool-call-parser", self.tool_call_parser]
        if self.reasoning_parser is not None:
            command += ["--reasoning-parser", self.reasoning_parser]
        if self.sleep:
            command.append("--enable-sleep-mode")
            if not self.enforce_eager:
                command.append("--sleep-mode-offload-cudagraph")
        if self.publication == "adapter":
            command += ["--enable-lora", "--max-loras", str(self.max_loras)]
            command += ["--max-cpu-loras", str(max(_CPU_LORAS, self.max_loras))]
            command += ["--max-lora-rank", str(self.max_lora_rank)]
            # Not the output head: with it wrapped, vLLM 0.32 fails on prompt logprobs, which the probe needs.
            command += ["--lora-target-modules", *self.wrapped_modules]
        return command

    def environment(self) -> dict[str, str]:
        """Return the server's environment; publication needs the development endpoints."""
        return {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
            "VLLM_LOGGING_LEVEL": "INFO",
            **(allocator_settings(WHOLE_PINNED) if self.device == "cuda" else {}),
        }


def allocator_settings(*wanted: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of torch's allocator: these settings, beside those that the user has given."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    theirs = next((environment[name] for name in names if environment.get(name)), "")
    ours = [each for each in wanted if each.partition(":")[0] not in theirs]
    return dict.fromkeys(names, ",".join([theirs, *ours] if theirs else ours))


def allowed_lora_rank(rank: int) -> int:
    """Return the smallest adapter rank that vLLM supports and that is at least `rank`."""
    for allowed in _LORA_RANKS:
        if rank <= allowed:
            return allowed
    raise CannotHonour(
        f"LoRA rank {rank} is over vLLM's largest, {_LORA_RANKS[-1]}", hint="register with a smaller rank"
    )


def check_targets(settings: EngineSettings, targets: Sequence[str]) -> None:
    """Reject layers that the trainer would adapt and the engine would not serve."""
    served = settings.wrapped_modules
    lost = sorted(set(targets) - set(served))
    if lost and settings.publication == "adapter":
        kept = ", ".join(sorted(set(targets) & set(served))) or "those of attention"
        raise CannotHonour(
            f"the engine would not serve adapters on {', '.join(lost)} of {settings.served_name}",
            hint=f"name the others in lora.target_modules: {kept}",
        )


def apply_arguments(
    settings: EngineSettings,
    engine_args: Mapping[str, object],
    init_args: Mapping[str, object],
    lora_rank: int,
) -> EngineSettings:
    """Apply a registration's overrides; reject what this device or build cannot honour."""
    changes: dict[str, Any] = {}
    for name, value in engine_args.items():
        changes[name] = _checked(settings, name, value)
    for name, value in init_args.items():
        if name not in INIT_ARGUMENTS:
            _refuse_unknown("init_args", name, list(INIT_ARGUMENTS))
        changes[_FIELDS.get(name, name)] = _positive(name, value)
    if settings.publication == "adapter":
        changes["max_lora_rank"] = max(settings.max_lora_rank, allowed_lora_rank(lora_rank))
    return replace(settings, **changes)


def difference(current: EngineSettings, wanted: EngineSettings) -> str:
    """Describe the settings that differ: ``max_model_len 2048 → 4096``."""
    old, new = asdict(current), asdict(wanted)
    return ", ".join(f"{name} {old[name]} → {new[name]}" for name in old if old[name] != new[name])


_FIELDS = {"max_seq_length": "max_model_len"}
"""Arguments of a registration that set a field of another name."""
NO_PARSER = "none"
"""Given in place of a parser's name, to have none."""
_PARSER_NAME = re.compile(r"[a-z0-9_]{1,64}")


def _checked(settings: EngineSettings, name: str, value: object) -> str | float | bool | None:
    if name not in ENGINE_ARGUMENTS:
        _refuse_unknown("engine_args", name, list(ENGINE_ARGUMENTS))
    if name in _CUDA_ONLY and settings.device == "cpu":
        raise CannotHonour(
            f"engine_args.{name}={value!r} cannot be honoured: this backend runs on a CPU",
            hint=f"remove {name} from the configuration or serve on a CUDA machine",
        )
    if name == "gpu_memory_utilization":
        if not isinstance(value, int | float) or not 0 < value <= 1:
            raise CannotHonour(f"engine_args.gpu_memory_utilization={value!r} is not in (0, 1]")
        return float(value)
    if name in PARSERS:
        if not isinstance(value, str) or not _PARSER_NAME.fullmatch(value):
            raise CannotHonour(f"engine_args.{name}={value!r} is not the name of a parser of vLLM")
        return None if value == NO_PARSER else value
    if name == "enforce_eager":
        if not isinstance(value, bool):
            raise CannotHonour(f"engine_args.enforce_eager={value!r} is neither true nor false")
        return value
    if name == "tensor_parallel_size" and settings.device == "cpu" and value != 1:
        raise CannotHonour(
            f"engine_args.tensor_parallel_size={value!r} cannot be honoured: this backend runs on a CPU",
            hint="use 1, or serve on a machine with that many GPUs",
        )
    return _positive(name, value)


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CannotHonour(f"{name}={value!r} is not a positive whole number")
    return value


def _refuse_unknown(section: str, name: str, valid: list[str]) -> None:
    near = difflib.get_close_matches(name, valid, n=1)
    hint = f"did you mean {near[0]}?" if near else f"valid: {', '.join(valid)}"
    raise CannotHonour(f"{section}.{name} is not an argument that this backend can honour", hint=hint)


assert {*ENGINE_ARGUMENTS, *(_FIELDS.get(name, name) for name in INIT_ARGUMENTS)} <= {
    field.name for field in fields(EngineSettings)
}
