"""Which checkpoint the trainer scores beside the policy, and which it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from insitu.backend.ledger.rows import Run
from insitu.backend.serving.host import ModelHost
from insitu.errors import CannotHonour
from insitu.types import StepSettings

RUNS = {"run": "tiny", "same": "/models/tiny", "started": "tiny", "other": "large"}
SOURCES = {"started": "same@4"}


def reference(settings: StepSettings, run: str = "run") -> str | None:
    runs: dict[str, Any] = {
        name: SimpleNamespace(name=name, base_model=base, source=SOURCES.get(name))
        for name, base in RUNS.items()
    }

    def kept(run: Any, step: int, *, verify: bool) -> Path:
        assert verify
        return Path(f"{run.name}@{step}")

    host = SimpleNamespace(
        engine=SimpleNamespace(served_name="tiny", model="/models/tiny"),
        _ledger=SimpleNamespace(get_run=runs.__getitem__),
        _checkpoint=kept,
    )
    path = ModelHost.reference(cast(ModelHost, host), cast(Run, runs[run]), settings)
    return None if path is None else str(path)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (StepSettings(), None),
        (StepSettings(reference_step=3), None),
        (StepSettings(beta=0.1), None),
        (StepSettings(beta=0.1, reference_step=3), "run@3"),
        (StepSettings(method="sft"), None),
        (StepSettings(method="dpo"), None),
        (StepSettings(method="dpo", reference_step=3), "run@3"),
        (StepSettings(method="dpo", reference_step=0), None),
        (StepSettings(method="distill", teacher="run@2"), "run@2"),
        (StepSettings(method="distill", teacher="same@4"), "same@4"),
        (StepSettings(method="distill", teacher="same@0"), None),
        (StepSettings(method="distill", teacher="started@0"), "started@0"),
        (StepSettings(method="distill", teacher="served-elsewhere"), None),
    ],
)
def test_the_reference_of_a_step(settings: StepSettings, expected: str | None) -> None:
    assert reference(settings) == expected


def test_step_0_of_a_run_that_started_from_something_is_its_start() -> None:
    assert reference(StepSettings(method="dpo", reference_step=0), "started") == "started@0"
    assert reference(StepSettings(method="dpo"), "started") is None
    assert reference(StepSettings(method="dpo", reference_step=0)) is None


@pytest.mark.parametrize("step", [0, 4])
def test_a_teacher_on_another_base_model_is_refused(step: int) -> None:
    with pytest.raises(CannotHonour, match=f"other@{step} is on large and cannot teach run run on tiny"):
        reference(StepSettings(method="distill", teacher=f"other@{step}"))
