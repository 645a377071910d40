"""The message from the trainer's side of the device checks to the command that started it."""

from __future__ import annotations

from dataclasses import dataclass, field

from insitu.backend.plan.engine import Device, Dtype
from insitu.doctor.finding import Finding
from insitu.wire.message import Message

Scores = list[list[float]]


@dataclass(frozen=True, slots=True)
class Lesson(Message):
    """One training step on fixed sequences: its adapter, and the trainer's scores before and after."""

    adapter: str
    fixed: list[list[int]]
    before: Scores
    after: Scores


@dataclass(frozen=True, slots=True)
class TrainerReport(Message):
    """The device, the findings, and the lesson for the engine's checks if there is one."""

    device: Device
    dtype: Dtype
    findings: list[Finding] = field(default_factory=list[Finding])
    lesson: Lesson | None = None
