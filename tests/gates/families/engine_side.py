"""One family through vLLM's own classes: the model as an engine builds it, and its LoRA manager."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from insitu.backend.in_engine.adapters import AdapterCheck

_ADAPTER_RANK = 8


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine does with a family's adapter."""

    model: str
    """vLLM's class."""
    hybrid: bool
    left_out: tuple[str, ...]
    """Tensors of the adapter that the engine would not compute with."""


@contextmanager
def one_process() -> Generator[None]:
    """Give vLLM's layers the process groups that they ask for."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    with tempfile.TemporaryDirectory() as folder:
        with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
            init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            initialize_model_parallel(1, 1)
        yield
        cleanup_dist_env_and_memory()


def lora_manager(model: Any, config: Any, lora_config: Any) -> Any:
    """Return vLLM's manager of one worker: what it has wrapped of a model, and the adapters it loads."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    made: Any = LRUCacheWorkerLoRAManager.__new__(LRUCacheWorkerLoRAManager)
    made.__dict__ |= {
        "_lora_model_cls": LoRAModel,
        "_cached_dummy_lora": False,
        "embedding_modules": getattr(model, "embedding_modules", {}),
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "vocab_size": 160,
        "max_position_embeddings": 128,
        "device": torch.device("cpu"),
        "lora_config": lora_config,
    }
    made.create_lora_manager(model, config)
    return made


def left_out(manager: Any, adapter: Path) -> list[str]:
    """Return what the product's check finds: tensors that no layer of this worker computes with."""
    check = AdapterCheck()
    check.model_runner = SimpleNamespace(lora_manager=manager)
    return check.tensors_left_out(str(adapter))


def serve(folder: Path, adapter: Path, targets: Sequence[str], *, dummy: bool) -> Served:
    """Build the model that an engine would, load its weights and an adapter; raise what vLLM raises.

    `dummy`: without the weights, whose names for images Transformers writes otherwise than the hub has them.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    arguments: Any = {
        "model": str(folder),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 64,
        "max_num_seqs": 2,
        "load_format": "safetensors",
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": _ADAPTER_RANK,
        "lora_target_modules": list(targets),
    }
    config = EngineArgs(**arguments).create_engine_config()
    with set_current_vllm_config(config):
        with set_default_torch_dtype(torch.float32):
            model = initialize_model(config)
            if not dummy:
                get_model_loader(config.load_config).load_weights(model, config.model_config)
        manager = lora_manager(model, config, config.lora_config)
        manager.add_adapter(LoRARequest("a", 1, str(adapter)))
    left = tuple(left_out(manager, adapter))
    return Served(type(model).__name__, bool(getattr(model, "is_hybrid", False)), left)
