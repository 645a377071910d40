"""Does an engine compute with all of an adapter?

vLLM answers 200 for an adapter of layers that it has not wrapped, or whose names it does not map to its own,
and computes without them. So each worker compares the tensors of the file with the layers that it wrapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_HALVES = (".lora_A.weight", ".lora_B.weight")


class AdapterCheck:
    """Methods that vLLM adds to its workers, by the name of this class (`--worker-extension-cls`)."""

    model_runner: Any

    def tensors_left_out(self, directory: str) -> list[str]:
        """Return the tensors of an adapter that no layer of this worker computes with."""
        from safetensors import safe_open
        from vllm.lora.utils import parse_fine_tuned_lora_name

        manager = self.model_runner.lora_manager._adapter_manager
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        names = None if mapper is None else mapper.get_rename_mapper()
        with safe_open(Path(directory) / "adapter_model.safetensors", framework="pt") as file:
            layers = {tensor: parse_fine_tuned_lora_name(tensor, names)[0] for tensor in file.keys()}  # noqa: SIM118
        return left_out(layers, computed_layers(manager.modules, manager.packed_modules_mapping))


def computed_layers(wrapped: Iterable[str], packed: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the layers of a checkpoint that the wrapped ones are: `qkv_proj` is `q_proj` and two others."""
    layers: set[str] = set()
    for name in wrapped:
        parent, dot, last = name.rpartition(".")
        layers |= {f"{parent}{dot}{part}" for part in (last, *packed.get(last, ()))}
    return layers


def left_out(layers: Mapping[str, str], computed: set[str]) -> list[str]:
    """Return the tensors without effect, given each one's layer: it is not computed, or A or B is missing."""
    halves = {tensor.removesuffix(end) for tensor in layers for end in _HALVES if tensor.endswith(end)}
    whole = {name for name in halves if all(name + end in layers for end in _HALVES)}
    return sorted(
        tensor
        for tensor, layer in layers.items()
        if layer not in computed or tensor.rpartition(".lora_")[0] not in whole
    )


VLLM_ARGUMENTS = ("--worker-extension-cls", f"{AdapterCheck.__module__}.{AdapterCheck.__qualname__}")
