"""Faults in real training steps of a small model, and the verdict that names each."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.types import TrainingSequence
from tests.support.recorded_runs import judged
from tests.support.sequences import altered
from tests.support.small_runs import Odd, SmallRun


def not_finite(made: list[TrainingSequence]) -> list[TrainingSequence]:
    return [altered(sequence, advantages=[float("inf")] * len(sequence.token_ids)) for sequence in made]


@pytest.mark.parametrize(
    ("odd", "cause"),
    [
        (Odd(), None),
        (Odd(tamper=not_finite), "updates_skipped"),
        (Odd(arriving=0.3), "not_arriving"),
        (Odd(noise=0.5), "mismatch"),
        (Odd(temperature=0.05), "low_temperature"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_a_fault_of_the_step_is_told(odd: Odd, cause: str | None, tmp_path: Path) -> None:
    run = SmallRun(tmp_path, odd=odd)
    lines = judged([run.line() for _ in range(3)])
    assert lines[-1].get("verdict", {}).get("causes") == ([cause] if cause else [])
