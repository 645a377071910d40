"""Round float32 values to a 16-bit type at random, so that the mean of the rounding is the value itself.

Rounding to nearest loses every change that is smaller than half the distance between two 16-bit values: the
base model's weights are such values, and a small update leaves them all where they were. Here a value goes
to one of its two neighbours, to the nearer one more often, so sums over many weights keep the change. A value
that needs no rounding never moves.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""Bits of a float32 mantissa that the type does not have."""
_CHUNK = 1 << 18
"""Values per pass: bounds the memory of the random numbers, which are drawn in this order."""
_LEAST_NORMAL_FLOAT16 = 2.0**-14


def seed_of(run: str, step: int, tensor: str) -> int:
    """Return the seed of one tensor's rounding: a step that is exported again gives the same bytes."""
    digest = hashlib.sha256(f"{run}\0{step}\0{tensor}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


@torch.no_grad()
def round_stochastically(values: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Return `values` in `dtype`, rounded without bias. `values` are float32 and used as scratch memory.

    float32 needs no rounding. The random numbers are drawn on the device of the values.
    """
    if dtype not in _DROPPED_BITS:
        return values.to(dtype)
    generator = torch.Generator(values.device).manual_seed(seed)
    for part in values.view(-1).split(_CHUNK):
        if dtype is torch.float16:
            # Below the least normal number float16 is evenly spaced; this moves it where float32 is, too.
            shift = (part.abs() < _LEAST_NORMAL_FLOAT16) * part.sign() * _LEAST_NORMAL_FLOAT16
            _drop_bits(part.add_(shift), _DROPPED_BITS[dtype], generator)
            part.sub_(shift)
        else:
            _drop_bits(part, _DROPPED_BITS[dtype], generator)
    return values.to(dtype)


def _drop_bits(part: Tensor, num_bits: int, generator: torch.Generator) -> None:
    """Clear the lowest bits in place, after adding a random number of that many bits, which may carry."""
    drawn = torch.empty(-(-len(part) // 4), dtype=torch.int64, device=part.device)
    # Four numbers from each draw; the right shift leaves -2^(n-1) to 2^(n-1) - 1.
    noise = drawn.random_(-(2**63), None, generator=generator).view(torch.int16)[: len(part)]
    noise = noise.bitwise_right_shift_(16 - num_bits)
    bits = part.view(torch.int32)
    bits.add_(noise).add_(1 << (num_bits - 1)).bitwise_and_(-(1 << num_bits))
