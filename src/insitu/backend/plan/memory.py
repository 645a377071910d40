"""Bytes that engine and trainer take on one device, from a model's shape.

What a row takes in the trainer was measured on its own policy, adapters and head with fake tensors (see
`training/footprint`). The output head, for T tokens of h hidden, takes 0.56 GB + T · 3h and a cast of the
adapter, if that is more than a layer's backward pass. The reserves (CUDA contexts, CUDA graphs, NCCL,
fragments of the allocator) are estimates: they exist on a GPU only.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from insitu.training.footprint.shape import Activations, ModelShape
from insitu.wire.engine import MAX_LORAS

GIB = 2**30
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

BRANCHED_ROW = 1.25
"""A row with branches may be this much longer than the longest sequence (`training/batching.py`)."""

_LORA_BYTES = 16
"""Per parameter of an adapter: weight, gradient and Adam's two moments, all float32."""
_FOUR_BIT_BYTES = 0.5 + 4 / 64
"""Per weight of a linear module in NF4: half a byte, and a float32 scale for every 64 of them."""
_HEAD_BYTES = 560_000_000
_ENGINE_ACTIVATION_TOKENS = 8192
"""The most tokens that vLLM computes at once by default on a large GPU; its profile run takes as many."""
_ENGINE_LOGIT_COPIES = 4
CALLS_AT_ONCE = 4
"""The default length lets an engine hold this many of the longest calls."""

CUDA_CONTEXT = int(0.6 * GIB)
CUDA_GRAPHS = 1 * GIB
NCCL_BUFFERS = GIB // 2
ALLOCATOR_SHARE = 0.04
"""Part of a device that is left to fragments of the trainer's allocator."""
LARGEST_SHARE = 0.92
"""vLLM's own default: what it does not see in its profile run needs the rest."""


@dataclass(frozen=True, slots=True)
class Part:
    """One line of the table: what takes how many bytes of a device."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """One rank of the trainer: what is resident, and what a row of tokens adds."""

    base: int
    gathered: int
    """Layers that FSDP2 holds whole for a while, or one weight matrix out of four bits."""
    adapter: int
    activations: Activations
    head_per_token: float
    head: int
    """The output head's own chunk of logits, beside the adapter cast to the base's precision."""

    @property
    def resident(self) -> int:
        return self.base + self.gathered + self.adapter

    def held(self, num_tokens: int) -> int:
        """Return what a row keeps from the forward to the backward pass."""
        return int(self.activations.held(num_tokens))

    def working(self, num_tokens: int) -> int:
        """Return the most beyond what is held: a layer's backward pass, or the output head."""
        head = self.head + self.head_per_token * num_tokens
        return int(max(head, self.activations.working(num_tokens)))

    def longest_row(self, num_bytes: int, most: int) -> int:
        """Return the tokens, at most `most`, that fit into `num_bytes` beside what is resident."""
        free = num_bytes - self.resident
        return bisect_right(range(1, most + 1), free, key=lambda n: self.held(n) + self.working(n))


def trainer_memory(
    shape: ModelShape,
    *,
    dtype: str = "bfloat16",
    num_ranks: int = 1,
    lora_rank: int = 16,
    four_bit: bool = False,
    checkpoint_layers: bool = True,
) -> TrainerMemory:
    """Compute one rank's memory. Several ranks share the base; every one has the whole adapter."""
    width = _BYTES[dtype]
    layer, outer = width * shape.largest_layer, width * shape.outer_parameters
    base, gathered = width * shape.num_parameters, 0
    if four_bit:
        base -= int((width - _FOUR_BIT_BYTES) * shape.linear_parameters)
        gathered = width * shape.largest_linear
    if num_ranks > 1:
        base = -(-base // num_ranks)
        gathered = 2 * layer + outer
    row = shape.activations(checkpoint_layers=checkpoint_layers, lora_rank=lora_rank)
    scale = width / 2  # measured in bfloat16
    return TrainerMemory(
        base=base,
        gathered=gathered,
        adapter=_LORA_BYTES * shape.lora_parameters(lora_rank),
        activations=Activations(row.held.times(scale), row.working.times(scale)),
        head_per_token=scale * 3 * shape.hidden,
        head=_HEAD_BYTES + width * shape.lora_parameters(lora_rank),
    )


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """One device of a vLLM engine, without its KV cache."""

    weights: int
    adapters: int
    """Slots for the adapters that vLLM holds on the device."""
    activations: int
    graphs: int
    runtime: int
    """CUDA context and, with tensor parallelism, NCCL's buffers."""
    states: int
    """Memory of layers that keep a state instead of keys and values, for the calls at once."""
    kv_per_token: int

    @property
    def fixed(self) -> int:
        return self.weights + self.adapters + self.activations + self.graphs + self.runtime + self.states


def engine_memory(
    shape: ModelShape,
    *,
    dtype: str = "bfloat16",
    tensor_parallel_size: int = 1,
    lora_rank: int = 16,
    max_loras: int = MAX_LORAS,
    with_adapters: bool = True,
    compiled: bool = True,
    max_num_seqs: int = 256,
) -> EngineMemory:
    """Compute one device's share. Keys that are fewer than the devices are copied, as vLLM does."""
    width, tp = _BYTES[dtype], tensor_parallel_size
    slots = max_loras * width * shape.lora_parameters(lora_rank) if with_adapters else 0
    per_token = 3 * width * shape.inner / tp + 6 * width * shape.hidden
    logits = _ENGINE_LOGIT_COPIES * 4 * max_num_seqs * shape.vocabulary
    return EngineMemory(
        weights=width * shape.num_parameters // tp,
        adapters=slots // tp,
        activations=int(per_token * _ENGINE_ACTIVATION_TOKENS) + logits,
        graphs=CUDA_GRAPHS if compiled else 0,
        runtime=runtime_bytes(tp),
        states=CALLS_AT_ONCE * 4 * shape.state_values // tp,  # float32
        kv_per_token=width * shape.kept_per_token // min(tp, shape.num_kv_heads),
    )


def runtime_bytes(num_processes: int) -> int:
    """Return what CUDA, and NCCL between several processes, keep on a device."""
    return CUDA_CONTEXT + (NCCL_BUFFERS if num_processes > 1 else 0)


def gib(num_bytes: int) -> str:
    """Write bytes for people: ``15.2 GiB``."""
    return f"{num_bytes / GIB:.1f} GiB"
