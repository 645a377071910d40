"""A base whose linear layers are stored in 4 bits (NF4, bitsandbytes): 0.6 bytes a parameter instead of 2.

Embedding, head and norms keep the run's precision, and so do all products: a layer's weight is dequantised
when it is used, in the forward and in the backward pass. Adapters on top are float32 as ever.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from transformers import BitsAndBytesConfig

from insitu.errors import CannotHonour
from insitu.system.torch_builds.installing import install_command


def quantization(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return the settings to load a base in NF4 that computes in `dtype`."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise CannotHonour(
            "a 4-bit base needs bitsandbytes, which is not installed",
            hint=install_command("insitu[four-bit]"),
        )
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def keep_layout(model: Any) -> None:
    """Keep the layers' weights in the layout that has a gradient.

    On a CPU, a layer in evaluation mode repacks its weight for inference at the first call without
    gradients, and from then on passes no gradient. Its mode has no other effect.
    """
    from bitsandbytes.nn.modules import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.training = True


def dequantised(weight: Any) -> Tensor:
    """Return a 4-bit weight as the values that a layer computes with."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)
