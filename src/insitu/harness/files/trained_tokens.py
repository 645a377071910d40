"""The trainer's figures of a step's tokens, as the backend keeps them with the step's checkpoint.

tokens/step-000012.safetensors    count, advantage: one per call; logprob: one per token; the calls' ids
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from insitu.errors import InvalidRequest
from insitu.json_values import JsonObject, as_list, as_object

TOKENS_FOLDER = "tokens"
_TYPES: dict[type[np.generic], str] = {np.float32: "F32", np.int32: "I32"}
Number = TypeVar("Number", np.int32, np.float32)
_FORMAT = "1"


@dataclass(frozen=True, slots=True)
class TrainedCall:
    """One call that a step trained on."""

    advantage: float
    logprobs: NDArray[np.float32]
    """The trainer's log-probability of each token, before the step's first update."""


def tokens_file(directory: Path, step: int) -> Path:
    """Return the file of a step below a run's directory."""
    return directory / TOKENS_FOLDER / f"step-{step:06d}.safetensors"


def read_tokens(content: bytes, source: str) -> Mapping[str, TrainedCall]:
    """Return the calls by id; `source` is for the error about content that is not such a file."""
    try:
        (size,) = struct.unpack_from("<Q", content)
        header = as_object(json.loads(content[8 : 8 + size])) or {}
        told = as_object(header.get("__metadata__")) or {}
        if told.get("format") != _FORMAT:
            raise ValueError(f"format {told.get('format')!r}, readable is {_FORMAT}")
        data = memoryview(content)[8 + size :]
        count_c = _column(header, data, "count", np.int32)
        advantage_c, logprob_t = (
            _column(header, data, name, np.float32) for name in ("advantage", "logprob")
        )
        calls = [str(call) for call in as_list(json.loads(str(told.get("calls")))) or []]
        ends = np.cumsum(count_c, dtype=np.int64)
        if len(calls) != len(count_c) or (ends[-1] if len(ends) else 0) != len(logprob_t):
            raise ValueError("its columns do not fit each other")
        parts = np.split(logprob_t, ends[:-1]) if len(ends) else []
        found = zip(calls, advantage_c.tolist(), parts, strict=True)
        return {call: TrainedCall(advantage, own_t) for call, advantage, own_t in found}
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise InvalidRequest(
            f"{source} is not a file of the trainer's figures: {error}",
            hint="delete it; the pages then show the sampler's figures alone",
        ) from error


def _column(header: JsonObject, data: memoryview, name: str, kind: type[Number]) -> NDArray[Number]:
    told = as_object(header[name]) or {}
    start, end = (int(str(each)) for each in as_list(told.get("data_offsets")) or [])
    if not 0 <= start <= end <= len(data):
        raise ValueError(f"{name} is cut off")
    if told.get("dtype") != _TYPES[kind]:
        raise ValueError(f"{name} has the type {told.get('dtype')!r}")
    return np.frombuffer(data[start:end], kind)  # little-endian, as every machine here is
