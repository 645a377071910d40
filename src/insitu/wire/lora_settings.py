"""The adapter of a run, as it is registered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from insitu.wire.message import Message


@dataclass(frozen=True, slots=True)
class LoraSettings(Message):
    """The adapter of a run. All linear layers are adapted."""

    rank: Annotated[int, Interval(ge=1, le=512)] = 8
    alpha: Annotated[int, Interval(ge=1, le=4096)] = 16
    seed: Annotated[int, Interval(ge=0, lt=2**31)] = 0
