"""Store an uploaded adapter as it arrives, and check what it is before it counts.

At most a chunk of it is in memory. Weights are safetensors only: their header is parsed, nothing is executed.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import orjson
from starlette.concurrency import run_in_threadpool

from insitu.backend.adapters.safetensors_header import StoredTensor, read_header
from insitu.backend.api.arriving import arriving
from insitu.backend.api.settings import Limits
from insitu.backend.ledger import adapter_files
from insitu.errors import CannotHonour, InvalidRequest, TooLarge
from insitu.wire.message import Malformed, read
from insitu.wire.starts.adapter_upload import AdapterHead
from insitu.wire.starts.peft_config import PeftConfig

_MAX_HEAD_BYTES = 256 * 2**10
_TENSOR = re.compile(r"base_model\.model\.(?P<layer>[\w.]+)\.lora_(?P<part>[AB])\.weight")
_DTYPES = ("F32", "F16", "BF16")


class AdapterReader:
    """Reads one upload."""

    def __init__(self, state_dir: Path, digest: str, limits: Limits, name: str | None = None) -> None:
        """`digest` is that of the upload, `name` the one to store it under; None: the digest itself."""
        self._state_dir = state_dir
        self._digest = digest
        self._name = name or digest
        self._limits = limits

    async def store(self, chunks: AsyncIterator[bytes]) -> None:
        """Store the upload durably, or raise and leave nothing."""
        staging = await run_in_threadpool(adapter_files.stage, self._state_dir)
        with ExitStack() as on_failure:
            on_failure.callback(shutil.rmtree, staging)
            head = await self._receive(chunks, staging / adapter_files.WEIGHTS)
            await run_in_threadpool(self._check, head, staging)
            await run_in_threadpool(adapter_files.commit, staging, self._name)
            on_failure.pop_all()

    async def _receive(self, chunks: AsyncIterator[bytes], weights: Path) -> bytes:
        """Write the weights to their file; return the first line."""
        digest, head, in_head = hashlib.sha256(), bytearray(), True
        with await run_in_threadpool(weights.open, "xb") as out:
            async for chunk in arriving(chunks, self._limits):
                digest.update(chunk)
                rest = chunk
                if in_head:
                    line, end, rest = chunk.partition(b"\n")
                    head += line
                    in_head = not end
                    if len(head) > _MAX_HEAD_BYTES:
                        raise TooLarge(f"the first line is over {_MAX_HEAD_BYTES} bytes")
                await run_in_threadpool(out.write, rest)
        if digest.hexdigest() != self._digest:
            raise InvalidRequest(
                f"the upload has the SHA-256 {digest.hexdigest()}, not {self._digest}",
                hint="upload it again, under the hash of its whole body",
            )
        return bytes(head)

    def _check(self, head: bytes, staging: Path) -> None:
        """Check configuration and tensors; write the configuration with the layers that the tensors name."""
        try:
            config = read(AdapterHead, head).config
        except Malformed as error:
            raise InvalidRequest(
                f"the first line is not a configuration: {error}",
                hint='send {"config": <adapter_config.json>}',
            ) from error
        layers = _layers(staging / adapter_files.WEIGHTS, PeftConfig.read(config).rank)
        targets = sorted({layer.rpartition(".")[2] for layer in layers})
        content = orjson.dumps({**config, "target_modules": targets}, option=orjson.OPT_INDENT_2)
        (staging / adapter_files.CONFIG).write_bytes(content)


def _layers(path: Path, rank: int) -> set[str]:
    """Return the layers that the tensors belong to; reject tensors that are not those of LoRA."""
    parts: dict[str, set[str]] = {"A": set(), "B": set()}
    for name, tensor in read_header(path).items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise CannotHonour(
                f"the tensor {name!r:.200} is not one of LoRA on a linear layer",
                hint="adapters may hold lora_A and lora_B of linear layers only",
            )
        _check_tensor(name, tensor, found["part"], rank)
        parts[found["part"]].add(found["layer"])
    if parts["A"] != parts["B"] or not parts["A"]:
        odd = sorted(parts["A"] ^ parts["B"])
        raise InvalidRequest(f"the weights lack lora_A or lora_B of {odd[:3] or 'every layer'}")
    return parts["A"]


def _check_tensor(name: str, tensor: StoredTensor, part: str, rank: int) -> None:
    if tensor.dtype not in _DTYPES:
        raise CannotHonour(
            f"the tensor {name} has type {tensor.dtype}", hint=f"convert it to one of {', '.join(_DTYPES)}"
        )
    if len(tensor.shape) != 2 or tensor.shape[0 if part == "A" else 1] != rank:
        raise InvalidRequest(f"the tensor {name} has shape {tensor.shape}, which does not fit r = {rank}")
