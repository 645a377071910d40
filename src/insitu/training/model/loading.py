"""Load the base model once: frozen, in the run's precision, and in parts if several ranks share it.

One rank lets Transformers place the whole model on its device. Several ranks start from a model without
storage, cut it with FSDP2 (see `shard`), and each reads its own rows of every tensor from the safetensors
files: no rank ever holds the whole model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from insitu.errors import CannotHonour, NotFound
from insitu.training.model import attention, four_bits
from insitu.training.model.policy import Policy
from insitu.training.model.self_check import check_head, settle_branches

_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def load_policy(
    base_model: str,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    mesh: DeviceMesh | None = None,
    checkpoint_layers: bool = False,
    four_bit: bool = False,
    kept_tokens: int = 0,
) -> Policy:
    """Load the base in `dtype` and freeze it. Read only safetensors and run no code of the model.

    With a mesh of several ranks, shard it over them. Adapters are injected afterwards and not sharded: they
    are small and replicated, and the caller sums their gradients, which keeps the denominator of the loss
    exact. `checkpoint_layers` keeps only each decoder layer's input and computes the rest again in the
    backward pass, in micro-batches of more than `kept_tokens`. `four_bit` keeps the linear layers in NF4, on
    one rank only.
    """
    directory = model_directory(base_model)
    config: Any = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    kind = _class_of(config)
    if mesh is None or mesh.size() == 1:
        model: Any = kind.from_pretrained(
            directory,
            dtype=dtype,
            device_map={"": device},
            use_safetensors=True,
            trust_remote_code=False,
            quantization_config=four_bits.quantization(dtype) if four_bit else None,
        )
        policy = prepare(model, checkpoint_layers, kept_tokens)
        if four_bit:
            four_bits.keep_layout(model)
        check_head(policy, base_model)
        settle_branches(policy)
        return policy
    if four_bit:
        raise CannotHonour(
            f"a 4-bit base cannot be sharded over {mesh.size()} ranks: each reads its rows of a tensor from "
            "the files, and quantised tensors have no rows",
            hint="use one trainer rank: --trainer-ranks 1, or a base in the run's precision",
        )
    policy = prepare(empty_model(config, dtype), checkpoint_layers, kept_tokens)
    load_sharded(policy, directory, device, dtype, mesh)
    check_head(policy, base_model)
    settle_branches(policy, functools.partial(_all_agree, device))
    for unit in policy.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()  # the checks leave the last one gathered
    return policy


def _all_agree(device: torch.device, holds: bool) -> bool:
    """Tell whether every rank says yes."""
    flag = torch.tensor(float(holds), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def _class_of(config: Any) -> Any:
    """Return the class that names a checkpoint's tensors as its files do, and as engines do.

    Models with images come as a wrapper around their text part. Transformers would load the text alone and
    name its layers otherwise.
    """
    wrapper = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    return AutoModelForImageTextToText if wrapper in (config.architectures or ()) else AutoModelForCausalLM


def empty_model(config: Any, dtype: torch.dtype) -> Any:
    """Build the model with parameters that have no storage; buffers have their values."""
    with init_empty_weights(include_buffers=False):
        model: Any = _class_of(config).from_config(config, dtype=dtype, trust_remote_code=False)
    model.tie_weights()  # the context above gave a tied head a parameter of its own
    return model


def load_sharded(
    policy: Policy, directory: Path, device: torch.device, dtype: torch.dtype, mesh: DeviceMesh
) -> None:
    """Cut a policy without storage over the mesh and read this rank's part of the files."""
    shard(policy, mesh, dtype)
    materialise(policy, device)
    load_shards(policy.model, directory, mesh)


def prepare(model: Any, checkpoint_layers: bool, kept_tokens: int = 0) -> Policy:
    """Freeze the model, give it our attention where it fits, and checkpoint its layers if asked."""
    # eval: no dropout in the base, so that the trainer scores a token as the engine sampled it
    model.eval().requires_grad_(False)
    policy = Policy(model)
    if policy.can_branch:
        model.set_attn_implementation(attention.NAME)
    elif getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # Gemma 2: torch's own kernel has no cap, and leaves it out
    if checkpoint_layers:
        for layer in policy.layers:
            # inside the FSDP2 unit, so that the weights are there when the layer is computed again
            layer.forward = functools.partial(_checkpointed, layer.forward, kept_tokens)
    return policy


def _checkpointed(forward: Callable[..., Any], kept_tokens: int, *args: Any, **kwargs: Any) -> Any:
    """Compute a layer now and, for the gradient, once more, unless the micro-batch is so small.

    (Transformers' own checkpoints work in training mode only.)
    """
    hidden_blh = args[0] if args else kwargs["hidden_states"]
    if not torch.is_grad_enabled() or hidden_blh.shape[:2].numel() <= kept_tokens:
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def shard(policy: Policy, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard the frozen base over the mesh, so that a rank gathers one part at a time and then lets go of it.

    The parts are FSDP2 units: each decoder layer, the embedding, the head, and the rest. Gathering needs a
    buffer as large as the part, so embedding and head together would take twice their size at once. A tied
    head is the embedding and stays in the rest.
    """
    precision = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False)
    units = [*policy.layers]
    embedding, head = policy.model.get_input_embeddings(), policy.model.lm_head
    if head.weight is not embedding.weight:
        units += [embedding, head]
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=precision)
    if head in units:
        register_fsdp_forward_method(head, "score")
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    for method in ("head_difference", "row_logprobs"):
        register_fsdp_forward_method(policy, method)


def materialise(policy: Policy, device: torch.device) -> None:
    """Give every shard storage on the device; buffers keep their values until those of the files are read."""
    buffers = {name: buffer.clone() for name, buffer in policy.named_buffers()}
    policy.to_empty(device=device)
    for name, buffer in policy.named_buffers():
        buffer.copy_(buffers[name])
    policy.model.tie_weights()


@torch.no_grad()
def load_shards(model: nn.Module, directory: Path, mesh: DeviceMesh) -> None:
    """Copy this rank's rows of every tensor from the files, one tensor at a time."""
    rank, world = mesh.get_local_rank(), mesh.size()
    with ExitStack() as stack:
        files = dict(_open_files(directory, stack))
        for name, parameter in model.named_parameters():  # a tied head comes once, as the embedding
            if name not in files:
                raise CannotHonour(
                    f"{directory} names its weights differently from the loaded model ({name}), so several "
                    "ranks cannot each read their part",
                    hint="use one trainer rank: --trainer-ranks 1",
                )
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            rows = -(-parameter.shape[0] // world)
            start = min(rank * rows, parameter.shape[0])
            local.copy_(files[name].get_slice(name)[start : start + local.shape[0]])
        for name, buffer in model.named_buffers():  # such as the factor of each layer of Gemma 4
            if name in files:
                buffer.copy_(files[name].get_tensor(name))


def tensor_names(directory: Path) -> set[str]:
    """Return the names of all tensors of a checkpoint."""
    with ExitStack() as stack:
        return {name for name, _ in _open_files(directory, stack)}


def _open_files(directory: Path, stack: ExitStack) -> Iterator[tuple[str, Any]]:
    """Yield (tensor name, open file) for every tensor of a checkpoint."""
    for path in sorted(directory.glob("*.safetensors")):
        opened: Any = stack.enter_context(safe_open(path, framework="pt"))
        for name in opened.keys():  # noqa: SIM118 - no mapping
            yield name, opened


def model_directory(base_model: str) -> Path:
    """Return a model's local directory; a hub id is downloaded if it is not cached."""
    if Path(base_model).is_dir():
        return Path(base_model)
    try:
        return Path(snapshot_download(base_model, allow_patterns=_MODEL_FILES))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise NotFound(
            f"the base model {base_model} is not a directory, and the hub did not provide it: {error}",
            hint=f"check the name, or download it first: hf download {base_model}",
        ) from error
