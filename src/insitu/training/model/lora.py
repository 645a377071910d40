"""Adapters of several runs on one base model (PEFT LoRA on linear layers, all but the head by default).

PEFT does the forward pass; names and files are PEFT's, so that engines can load an adapter directly.
"""

from __future__ import annotations

import itertools
import re
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from insitu.errors import CorruptCheckpoint
from insitu.training.model import four_bits
from insitu.training.model.families import families
from insitu.types import LoraSettings

_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class Adapter:
    """One run's adapter: its place in the base model (`slot`) and the layers it sits on, by name."""

    slot: str
    settings: LoraSettings
    layers: dict[str, Any]
    linear_layers: frozenset[str]
    """The last name parts of all layers that an adapter may sit on, and an engine serves."""

    @property
    def scaling(self) -> float:
        return self.settings.alpha / self.settings.rank

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained tensors by their names in PEFT's files, always in the same order."""
        named: dict[str, nn.Parameter] = {}
        for name, layer in self.layers.items():
            named[f"{_PEFT_PREFIX}{name}.lora_A.weight"] = layer.lora_A[self.slot].weight
            named[f"{_PEFT_PREFIX}{name}.lora_B.weight"] = layer.lora_B[self.slot].weight
        return named

    def config(self, base_model: str) -> dict[str, object]:
        """Return the content of ``adapter_config.json``; sorted, so that equal adapters give equal files."""
        return {
            "base_model_name_or_path": base_model,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "lora_alpha": self.settings.alpha,
            "lora_dropout": 0.0,
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": self.settings.rank,
            "target_modules": sorted({name.rpartition(".")[2] for name in self.layers}),
            "task_type": "CAUSAL_LM",
            "use_dora": False,
            "use_rslora": False,
        }

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], source: str) -> None:
        """Load the weights from a file's tensors; check names, shapes and finiteness before any copy."""
        mine = self.parameters()
        check_tensors(tensors, {name: parameter.shape for name, parameter in mine.items()}, source)
        for name, parameter in mine.items():
            parameter.copy_(tensors[name])


class AdapterPool:
    """The adapters on one base model; exactly one is active, and only its parameters get gradients."""

    def __init__(self, model: Any) -> None:
        self._model = model
        layers = {name.rpartition(".")[2] for name in _text_layers(model)}
        family = families().get(model.config.model_type)
        left_out = () if family is None else family.left_out
        self.linear_layers = frozenset(n for n in layers - {*left_out} if _stays_linear(model, n))
        self._outside = _elsewhere(model)
        self._peft: PeftModel | None = None
        self._active: str | None = None
        self._numbers = itertools.count()

    def add(self, settings: LoraSettings) -> Adapter:
        """Add a fresh adapter: A random by seed (the same on every rank), B zero, so it is the identity."""
        slot = f"slot{next(self._numbers)}"
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=settings.targets(self.linear_layers),
            exclude_modules=self._outside,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            if self._peft is None:
                self._peft = get_peft_model(self._model, config, adapter_name=slot)  # type: ignore[assignment]
            else:
                self._peft.add_adapter(slot, config)
        layers = {
            n: m for n, m in self._model.named_modules() if isinstance(m, LoraLayer) and slot in m.lora_A
        }
        for layer in layers.values():
            # Else PEFT copies the input into float32, which autocast takes back to 16 bits: equal bits, twice
            # the traffic.
            layer.cast_input_dtype_enabled = False
        adapter = Adapter(slot, settings, layers, self.linear_layers)
        self._active = None
        self.activate(adapter)
        return adapter

    def activate(self, adapter: Adapter) -> None:
        """Make this adapter the one that runs and learns."""
        if self._active != adapter.slot:
            self._require().set_adapter(adapter.slot)
            self._active = adapter.slot

    def off(self) -> AbstractContextManager[None]:
        """Disable the adapters within this context, leaving the base model alone."""
        return self._require().disable_adapter()

    def remove(self, adapter: Adapter) -> None:
        """Free the adapter's memory."""
        tuner: Any = self._require().base_model
        with warnings.catch_warnings():  # PEFT warns that it picks another active adapter: we do too, on use
            warnings.simplefilter("ignore", UserWarning)
            tuner.delete_adapter(adapter.slot)
        self._active = None

    def _require(self) -> PeftModel:
        assert self._peft is not None, "an adapter must be added before it can be used"
        return self._peft


def check_tensors(tensors: dict[str, Tensor], shapes: dict[str, torch.Size], source: str) -> None:
    """Reject a file whose tensors are not exactly the expected ones, or are not finite."""
    if unexpected := sorted(tensors.keys() ^ shapes.keys()):
        raise CorruptCheckpoint(
            f"{source} has other tensors than this model and these LoRA settings need: {unexpected[:3]} …",
            hint="check that base model and LoRA rank are those of the run that wrote it",
        )
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise CorruptCheckpoint(
                f"{source}: {name} has shape {list(tensors[name].shape)}, not {list(shape)}"
            )
        if not torch.isfinite(tensors[name]).all():
            raise CorruptCheckpoint(f"{source}: {name} contains NaN or infinite values")


@dataclass(frozen=True, slots=True)
class MergedTensor:
    """One tensor of base + adapter, by its name in the base checkpoint; it has no values until gathered."""

    name: str
    shape: torch.Size
    _base: Tensor
    _layer: Any
    _adapter: Adapter | None

    is_adapted: bool
    """True for all linear layers, also those without an adapter: an engine that fuses q, k and v reloads
    them together."""

    @torch.no_grad()
    def gather(self) -> Tensor:
        """Return the whole tensor; an adapted one is ``base + scaling · B · A`` in float32.

        With a sharded base this is a collective. A base in 4 bits is dequantised, as in the forward pass.
        """
        whole = _whole(self._base)
        if self._adapter is None:
            return whole
        slot = self._adapter.slot
        delta = self._layer.lora_B[slot].weight.float() @ self._layer.lora_A[slot].weight.float()
        return delta.mul_(self._adapter.scaling).add_(whole)


def merged_tensors(model: Any, adapter: Adapter) -> list[MergedTensor]:
    """List every model tensor, in the same order on every rank.

    Tied tensors come once, under their first name (the embedding): engines tie the head themselves.
    """
    seen: set[int] = set()
    listed: list[MergedTensor] = []
    for key, tensor in model.state_dict(keep_vars=True).items():
        layer_name, is_linear, rest = key.partition(".base_layer.")
        is_statistic = ".weight." in key  # of a 4-bit weight
        if ".lora_" in key or is_statistic or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        layer = adapter.layers.get(layer_name) if is_linear and rest == "weight" else None
        state = getattr(tensor, "quant_state", None)
        name = key.replace(".base_layer.", ".")
        *_, linear, part = "", *name.split(".")
        listed.append(
            MergedTensor(
                name,
                tensor.shape if state is None else state.shape,
                tensor,
                layer,
                None if layer is None else adapter,
                is_adapted=part == "weight" and linear in adapter.linear_layers,
            )
        )
    return listed


def _whole(tensor: Any) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return four_bits.dequantised(tensor) if hasattr(tensor, "quant_state") else tensor.detach()


def _text_layers(model: Any) -> dict[str, nn.Linear]:
    """Return the linear layers of a model's decoder by their names: no head, no part for images."""
    return {
        f"{parent_name}.{name}": module
        for parent_name, parent in model.get_decoder().named_modules(prefix=_decoder_name(model))
        for name, module in parent.named_children()
        if isinstance(module, nn.Linear) and not _is_read_past(parent, name)
    }


def _is_read_past(parent: nn.Module, name: str) -> bool:
    """Tell whether a layer's weight goes into a fused kernel, past what PEFT adds: Mamba's output."""
    return name == "out_proj" and hasattr(parent, "ssm_state_size")


def _elsewhere(model: Any) -> str:
    """Return the pattern of the names outside the decoder, as PEFT takes it."""
    return rf"(?!{re.escape(_decoder_name(model))}\.).*"


def _decoder_name(model: Any) -> str:
    decoder = model.get_decoder()
    (name,) = (name for name, module in model.named_modules() if module is decoder)
    return name


def _stays_linear(model: Any, last: str) -> bool:
    """Tell whether PEFT adapts the linear layers of this name.

    In families whose files have an expert per linear layer, it takes the names of those for the experts,
    which Transformers keeps in one tensor, and engines compute without their adapters.
    """
    config = LoraConfig(target_modules=[last])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # it is one of several that are one tensor now
        return False
    return last in (config.target_modules or ())
