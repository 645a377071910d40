"""The messages between the supervisor and a trainer rank that are not training data."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from insitu.json_values import JsonValue
from insitu.training.packing import Limits


class RankArguments(TypedDict):
    """The arguments of `TrainerRank`."""

    rank: int
    world_size: int
    master_address: str
    master_port: int
    base_model: str
    dtype: str
    num_threads: int
    device: str
    max_micro_batch_tokens: NotRequired[int]
    checkpoint_layers: NotRequired[bool]
    kept_tokens: NotRequired[int]
    four_bit: NotRequired[bool]


class OpenRun(TypedDict):
    """A run in a rank's memory."""

    step: int
    lora: dict[str, JsonValue]


class RankInfo(TypedDict):
    """One rank and its runs, for health and logs."""

    rank: int
    world_size: int
    base_model: str
    device: str
    dtype: str
    num_threads: int
    load_seconds: float
    vocabulary_size: int
    max_length: int | None
    max_micro_batch_tokens: int
    can_branch: bool
    linear_layers: list[str]
    """Names of the layers that an adapter may sit on."""
    runs: dict[str, OpenRun]


def limits_of(info: RankInfo) -> Limits:
    """Return what a rank can take; it is the same on all ranks."""
    return Limits(
        info["vocabulary_size"], info["max_length"], info["max_micro_batch_tokens"], info["can_branch"]
    )


class LoadedRank(RankInfo):
    """The same with the process that runs it."""

    pid: int
