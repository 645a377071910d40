"""The header of a safetensors file: names, types and shapes, checked against the size of the file.

8 bytes: length of the header ─► header, JSON ─► the tensors' bytes, one after the other, nothing between
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Interval, MaxLen, MinLen

from insitu.errors import InvalidRequest
from insitu.json_size import count_values
from insitu.json_values import JsonObject, as_object, parse_json
from insitu.system.archives import HEAD_BYTES, packed_kind
from insitu.wire.message import Malformed, Message, read_object

MAX_HEADER_BYTES = 16 * 2**20
_MAX_VALUES = 2**20
"""An adapter of 100,000 tensors has fewer."""
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_Size = Annotated[int, Interval(ge=0, lt=2**48)]


@dataclass(frozen=True, slots=True)
class StoredTensor(Message):
    """One tensor as the header lists it."""

    dtype: str
    shape: Annotated[list[_Size], MaxLen(8)]
    data_offsets: Annotated[list[_Size], MinLen(2), MaxLen(2)]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name; raise InvalidRequest unless the file is whole."""
    size = path.stat().st_size
    with path.open("rb") as opened:
        kind = packed_kind(opened.read(HEAD_BYTES))
        if kind is not None:
            raise _broken(f"it is {kind}; archives are never unpacked, and pickles never loaded")
        opened.seek(0)
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise _broken(f"its header would have {length} bytes, the file has {size}")
        header = _parsed(opened.read(length))
    header.pop("__metadata__", None)
    tensors = {name: _tensor(name, entry) for name, entry in header.items()}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        start, stop = tensor.data_offsets
        if start != end or stop - start != math.prod(tensor.shape) * _SIZES.get(tensor.dtype, -1):
            raise _broken(f"the bytes of {name!r:.200} are not where its type and shape say")
        end = stop
    if 8 + length + end != size:
        raise _broken(f"its tensors end at byte {8 + length + end}, the file at {size}")
    return tensors


def _parsed(header: bytes) -> JsonObject:
    count_values(header, _MAX_VALUES)
    try:
        found = as_object(parse_json(header))
    except (ValueError, RecursionError) as error:
        raise _broken(f"its header is not JSON ({type(error).__name__})") from error
    if found is None:
        raise _broken("its header is no JSON object")
    return found


def _tensor(name: str, entry: object) -> StoredTensor:
    try:
        return read_object(StoredTensor, entry)
    except Malformed as error:
        raise _broken(f"its entry {name!r:.200} is wrong: {error}") from error


def _broken(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"the weights are not a whole safetensors file: {why}",
        hint="send the bytes of adapter_model.safetensors",
    )
