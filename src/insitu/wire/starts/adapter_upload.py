"""An adapter on its way to the backend: one line with its configuration, then the file of its weights."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from insitu.errors import InvalidRequest
from insitu.json_values import as_object
from insitu.system.archives import reject_foreign_links, reject_packed
from insitu.wire.message import Message, encode
from insitu.wire.starts.adapter_files import CONFIG, WEIGHTS
from insitu.wire.starts.peft_config import PeftConfig
from insitu.wire.values import UPLOADED, FreeObject

ADAPTER_TYPE = "application/vnd.insitu.adapter"
"""The Content-Type of an upload."""
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class AdapterHead(Message):
    """The first line of an upload: `PUT /v1/adapters/{sha256}`, by the hash of line and weights."""

    config: FreeObject
    """The content of ``adapter_config.json``."""


@dataclass(frozen=True, slots=True)
class AdapterUpload:
    """A directory of PEFT, ready to be sent."""

    head: bytes
    weights: Path
    num_bytes: int
    sha256: str
    rank: int

    @property
    def init_from(self) -> str:
        """The name under which a registration starts from it."""
        return UPLOADED + self.sha256

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body of the upload."""
        yield self.head
        with await asyncio.to_thread(self.weights.open, "rb") as opened:
            while chunk := await asyncio.to_thread(opened.read, _CHUNK_BYTES):
                yield chunk


def read_adapter(directory: Path) -> AdapterUpload:
    """Read and hash a directory of PEFT; reject one that is not plain LoRA in safetensors."""
    if directory.is_file():
        reject_packed(directory)
        raise InvalidRequest(
            f"{directory} is a file", hint="give a directory as PEFT's save_pretrained writes it"
        )
    config, weights = directory / CONFIG, directory / WEIGHTS
    for path in (config, weights):
        if not path.is_file():
            raise InvalidRequest(
                f"{directory} has no {path.name}, so no run can start from it",
                hint="give a directory as PEFT's save_pretrained writes it; weights in other files, such as "
                "adapter_model.bin, a pickle, are never loaded",
            )
    reject_foreign_links(directory, config, weights)
    for path in (config, weights):
        reject_packed(path)
    try:
        content = as_object(orjson.loads(config.read_bytes()))
    except ValueError as error:
        raise InvalidRequest(f"{config} is not JSON: {error}") from error
    if content is None:
        raise InvalidRequest(f"{config} holds no JSON object")
    read = PeftConfig.read(content)
    ordered = orjson.loads(orjson.dumps(content, option=orjson.OPT_SORT_KEYS))
    head = encode(AdapterHead(ordered)) + b"\n"
    digest = hashlib.sha256(head)
    num_bytes = len(head)
    with weights.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return AdapterUpload(head, weights, num_bytes, digest.hexdigest(), read.rank)
