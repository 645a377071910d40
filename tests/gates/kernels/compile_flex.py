"""Compile the trainer's attention for a GPU that is not here.

`python -m tests.gates.kernels.compile_flex 8.9 64` takes flex attention with the trainer's own mask, forward
and backward, through torch's compiler and Triton down to the machine code of compute capability 8.9, for
heads of 64. It prints as JSON how much shared memory every kernel takes, and how much there is.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex
import triton
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import async_compile, config
from torch._inductor.graph import GraphLowering
from torch._inductor.select_algorithm import TritonTemplate
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils import _triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from insitu.training.model.attention import flex_mask

SHARED_BYTES = {"8.0": 166_912, "8.6": 101_376, "8.9": 101_376, "9.0": 232_448, "12.0": 101_376}
"""Of a block, by compute capability: A100, RTX 3090, RTX 4090, H100, RTX 5090."""
_LENGTH, _HEADS, _KEY_HEADS = 1000, 16, 2
_GPU = torch.device("cuda", 0)


def main(capability: str, head_dim: int) -> None:
    """Print the kernels of one GPU and head size."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    graphs = _captured(mode, head_dim)
    _pretend(capability)
    templates = _lowered(mode, graphs)
    limit = SHARED_BYTES[capability]
    target = GPUTarget("cuda", int(capability.replace(".", "")), 32)
    found = [
        {"kernel": name, "shared": _shared_bytes(made, target), "limit": limit} for name, made in templates
    ]
    print(json.dumps(found))


def _captured(mode: FakeTensorMode, head_dim: int) -> list[tuple[Any, Sequence[Any]]]:
    """Return the graphs of forward and backward, captured on fake tensors."""
    graphs: list[tuple[Any, Sequence[Any]]] = []

    def keep(graph: Any, inputs: Sequence[Any]) -> Any:
        graphs.append((graph, inputs))
        return graph

    flex._validate_device = lambda *_: None  # type: ignore[attr-defined]
    compiled = torch.compile(flex.flex_attention, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    with mode:
        end_bl = torch.full((1, _LENGTH), _LENGTH)
        size = (1, _HEADS, _LENGTH, head_dim)
        query = torch.empty(size, dtype=torch.bfloat16, requires_grad=True)
        key, value = (
            torch.empty((1, _KEY_HEADS, *size[2:]), dtype=torch.bfloat16, requires_grad=True)
            for _ in range(2)
        )
        output: Any = compiled(
            query, key, value, block_mask=flex_mask(end_bl), scale=head_dim**-0.5, enable_gqa=True
        )
        torch.autograd.grad(output, (query, key, value), torch.empty_like(output))
    return graphs


def _pretend(capability: str) -> None:
    """Let torch and Triton believe in a GPU of this capability."""
    major, minor = map(int, capability.split("."))
    limit = SHARED_BYTES[capability]
    properties = SimpleNamespace(
        name="pretended",
        major=major,
        minor=minor,
        multi_processor_count=128,
        total_memory=24 << 30,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=1536,
        max_threads_per_block=1024,
        warp_size=32,
        gcnArchName="",
        shared_memory_per_block=49_152,
        shared_memory_per_block_optin=limit,
        shared_memory_per_multiprocessor=limit + 1024,
        L2_cache_size=50 << 20,
        uuid="pretended",
    )
    for interface in (CudaInterface, CudaInterface.Worker):
        interface.get_device_properties = staticmethod(lambda *_, **__: properties)
        interface.current_device = staticmethod(lambda: 0)
    CudaInterface.is_available = staticmethod(lambda: True)
    CudaInterface.device_count = staticmethod(lambda: 1)
    CudaInterface.get_compute_capability = staticmethod(lambda *_, **__: 10 * major + minor)
    CudaInterface.is_bf16_supported = staticmethod(lambda *_, **__: True)
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_, **__: (major, minor)
    torch.cuda.get_device_properties = lambda *_, **__: properties
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_name = lambda *_, **__: "pretended"
    torch.version.cuda = "13.0"
    _triton.has_triton = lambda *_, **__: True
    target = GPUTarget("cuda", 10 * major + minor, 32)
    known = {"max_shared_mem": limit, "multiprocessor_count": 128, "max_num_regs": 65536, "warpSize": 32}
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: 0,
            get_active_torch_device=lambda: _GPU,
            get_current_stream=lambda *_: 0,
            is_active=lambda: True,
            utils=SimpleNamespace(get_device_properties=lambda *_: known),
        )
    )
    config.compile_threads = 1
    config.fx_graph_cache = False


def _lowered(mode: FakeTensorMode, graphs: Sequence[tuple[Any, Sequence[Any]]]) -> list[tuple[str, Any]]:
    """Return the templates that torch's compiler fills in for the graphs, moved to the pretended GPU."""
    made: list[tuple[str, Any]] = []
    generate = TritonTemplate.generate_and_load

    def keep(template: TritonTemplate, *args: Any, **kwargs: Any) -> Any:
        result = generate(template, *args, **kwargs)
        if result is not None:
            made.append((template.name, result))
        return result

    TritonTemplate.generate_and_load = keep
    async_compile.AsyncCompile.triton = lambda *_, **__: None
    with mode, V.set_fake_mode(mode):
        for graph, inputs in graphs:
            for part in (graph, *(child for child in graph.children() if hasattr(child, "graph"))):
                for node in part.graph.nodes:
                    if "val" in node.meta:
                        node.meta["val"] = pytree.tree_map(_moved, node.meta["val"])
                    if node.op == "call_function" and "device" in node.kwargs:
                        node.kwargs = {**node.kwargs, "device": _GPU}
            moved = [_moved(each) for each in inputs]
            lowering = GraphLowering(
                graph, example_inputs=moved, shape_env=mode.shape_env, is_inference=False
            )
            with V.set_graph_handler(lowering):
                lowering.run(*moved)
    return made


def _moved(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_GPU)
    return value


def _shared_bytes(made: Any, target: GPUTarget) -> int:
    """Compile a filled-in template to machine code; return the shared memory of a block."""
    named = (value for name, value in vars(made.mod).items() if name.startswith("triton_"))
    (tuned,) = (value for value in named if hasattr(value, "configs"))
    meta, chosen = copy.deepcopy(tuned.triton_meta), tuned.configs[0]
    constants = {**meta.get("constants", {}), **chosen.kwargs}
    signature = {**dict.fromkeys(constants, "constexpr"), **meta["signature"]}
    source = ASTSource(tuned.fn, signature, constants, (meta.get("configs") or [None])[0])
    options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    return triton.compile(source, target=target, options=options).metadata.shared


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
