"""vLLM loads an adapter of layers that it does not wrap without a word; the check names the tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from insitu.backend.plan.engine import EngineSettings
from tests.gates.families.engine_side import left_out, lora_manager, one_process
from tests.gates.gate import gate

pytestmark = pytest.mark.timeout(240)
RANK, SIZE = 8, 64


@pytest.fixture(scope="module")
def manager() -> Iterator[Any]:
    """vLLM's manager of one worker, over a model of two layers, of which the engine's arguments wrap one."""
    from vllm.config import DeviceConfig, LoRAConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.models.interfaces import SupportsLoRA

    command = EngineSettings("m", "m", "cuda", "bfloat16", "adapter").command(1)
    at = command.index("--lora-target-modules")
    targets = [each for each in command[at + 1 :] if not each.startswith("-")]

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            options: Any = {"bias": False, "params_dtype": torch.float32}
            self.q_proj = ColumnParallelLinear(SIZE, SIZE, **options)
            self.out_proj = RowParallelLinear(SIZE, SIZE, **options)

    class Model(nn.Module, SupportsLoRA):
        lora_manager = None

        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace()
            self.mixer = Mixer()

    settings = VllmConfig(device_config=DeviceConfig("cpu"))
    with one_process(), set_current_vllm_config(settings):
        wrapping = LoRAConfig(
            max_lora_rank=RANK,
            max_loras=2,
            max_cpu_loras=8,
            lora_dtype=torch.bfloat16,
            target_modules=targets,
        )
        yield lora_manager(Model(), settings, wrapping)


def written(folder: Path, *layers: str) -> Path:
    shapes = {"A": (RANK, SIZE), "B": (SIZE, RANK)}
    tensors = {
        f"base_model.model.{layer}.lora_{half}.weight": torch.ones(shape)
        for layer in layers
        for half, shape in shapes.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 16, "bias": "none"}
    config |= {"target_modules": sorted({layer.rpartition(".")[2] for layer in layers})}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("layers", "lost"),
    [
        (("mixer.q_proj",), ()),
        (("mixer.q_proj", "mixer.out_proj"), ("mixer.out_proj",)),
        (("mixer.q_proj", "blender.q_proj"), ("blender.q_proj",)),
    ],
    ids=["whole", "not wrapped", "not mapped"],
)
def test_what_vllm_drops_in_silence_has_a_name(
    layers: tuple[str, ...], lost: tuple[str, ...], manager: Any, tmp_path: Path
) -> None:
    from vllm.lora.request import LoRARequest

    path = written(tmp_path, *layers)
    number = len(manager.list_adapters()) + 1
    assert manager.add_adapter(LoRARequest(f"a{number}", number, str(path))), "vLLM takes it"
    found = left_out(manager, path)
    assert found == [f"base_model.model.{layer}.lora_{half}.weight" for layer in lost for half in "AB"]
    gate(f"adapter-whole-{len(layers)}-{len(lost)}", len(found), 2 * len(lost), "tensors named")
