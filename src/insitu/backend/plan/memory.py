"""Bytes that engine and trainer take on one device: pure formulas over a model's shape.

The trainer's figures were measured on its own policy, adapters and head with fake tensors, and
tests/gates/test_planner.py measures them again. The reserves (CUDA contexts, CUDA graphs, NCCL, fragments of
the allocator) are estimates: they exist on a GPU only.

A row of T tokens, h hidden, i intermediate, k the width of the keys, L layers, r the rank of the adapter::

    with checkpointing      held  T · (2hL + 8.2h)                       then  T · (14i + 26.2h + 3.8k + 16r)
    without                 held  T · (L · (8i + 24.2h + 3.5k + 16r) + 4.3h)   then  T · (6i + 6h)
    output head             or 0.56 GB + T · 3h and a cast of the adapter, if that is more than the `then`
"""

from __future__ import annotations

from dataclasses import dataclass

from insitu.backend.plan.model_shape import ModelShape, bytes_per_parameter
from insitu.wire.engine import MAX_LORAS

GIB = 2**30

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
    held_per_token: float
    """Kept from the forward to the backward pass."""
    working_per_token: float
    """The most that one layer needs on top, in the backward pass or in a forward pass without checkpoints."""
    head_per_token: float
    head: int
    """The output head's own chunk of logits, beside the adapter cast to the base's precision."""

    @property
    def resident(self) -> int:
        return self.base + self.gathered + self.adapter

    def held(self, num_tokens: int) -> int:
        return int(self.held_per_token * num_tokens)

    def working(self, num_tokens: int) -> int:
        """Return the most beyond what is held: a layer's backward pass, or the output head."""
        head = self.head + self.head_per_token * num_tokens
        return int(max(head, self.working_per_token * num_tokens))

    def longest_row(self, num_bytes: int) -> int:
        """Return the tokens whose activations fit into `num_bytes` beside what is resident."""
        free = num_bytes - self.resident
        by_head = (free - self.head) / (self.held_per_token + self.head_per_token)
        by_layer = free / (self.held_per_token + self.working_per_token)
        return max(0, int(min(by_head, by_layer)))


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
    width = bytes_per_parameter(dtype)
    h, i, k = shape.hidden, shape.intermediate, shape.kv_size
    outer = width * shape.outer_parameters
    layer = width * shape.layer_parameters
    gathered = 0
    if four_bit:
        rest = width * (shape.layer_parameters - shape.linear_parameters)
        layer = int(_FOUR_BIT_BYTES * shape.linear_parameters) + rest
        gathered = width * max(inputs * outputs for inputs, outputs in shape.linears)
    base = -(-(shape.num_layers * layer + outer) // num_ranks)
    if num_ranks > 1:
        gathered = 2 * layer + outer
    scale = width / 2  # measured in bfloat16
    if checkpoint_layers:
        held = 2 * h * shape.num_layers + 8.2 * h
        working = 14 * i + 26.2 * h + 3.8 * k + 16 * lora_rank
    else:
        held = shape.num_layers * (8 * i + 24.2 * h + 3.5 * k + 16 * lora_rank) + 4.3 * h
        working = 6.0 * (i + h)
    return TrainerMemory(
        base=base,
        gathered=gathered,
        adapter=_LORA_BYTES * shape.lora_parameters(lora_rank),
        held_per_token=scale * held,
        working_per_token=scale * working,
        head_per_token=scale * 3 * h,
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
    kv_per_token: int

    @property
    def fixed(self) -> int:
        return self.weights + self.adapters + self.activations + self.graphs + self.runtime


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
    width, tp = bytes_per_parameter(dtype), tensor_parallel_size
    slots = max_loras * width * shape.lora_parameters(lora_rank) if with_adapters else 0
    per_token = 3 * width * shape.intermediate / tp + 6 * width * shape.hidden
    logits = _ENGINE_LOGIT_COPIES * 4 * max_num_seqs * shape.vocabulary
    kv_heads = max(1, shape.num_kv_heads // tp)
    return EngineMemory(
        weights=width * shape.num_parameters // tp,
        adapters=slots // tp,
        activations=int(per_token * _ENGINE_ACTIVATION_TOKENS) + logits,
        graphs=CUDA_GRAPHS if compiled else 0,
        runtime=runtime_bytes(tp),
        kv_per_token=2 * width * shape.num_layers * kv_heads * shape.head_dim,
    )


def runtime_bytes(num_processes: int) -> int:
    """Return what CUDA, and NCCL between several processes, keep on a device."""
    return CUDA_CONTEXT + (NCCL_BUFFERS if num_processes > 1 else 0)


def gib(num_bytes: int) -> str:
    """Write bytes for people: ``15.2 GiB``."""
    return f"{num_bytes / GIB:.1f} GiB"
