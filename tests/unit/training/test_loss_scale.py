"""The loss scale of float16: back after an overflow, up after many good updates, kept in the checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.training.model.loss_scale import LossScale
from insitu.types import LoraSettings, StepSettings
from tests.support.sequences import train

SETTINGS = StepSettings(learning_rate=1e-3)
FAR_TOO_HIGH = 2.0**30
pytestmark = pytest.mark.timeout(120)


def test_it_halves_at_once_and_doubles_after_two_hundred_good_updates() -> None:
    scale = LossScale().after(skipped=True)
    assert scale == LossScale(512.0, 0)
    for _ in range(199):
        scale = scale.after(skipped=False)
    assert scale == LossScale(512.0, 199)
    assert scale.after(skipped=False) == LossScale(1024.0, 0)
    assert scale.after(skipped=True) == LossScale(256.0, 0), "the count starts over"


def test_it_stays_within_its_bounds() -> None:
    assert LossScale(1.0).after(skipped=True).value == 1.0
    assert LossScale(2.0**24, 199).after(skipped=False).value == 2.0**24


def make_rank(model_dir: Path, dtype: str) -> TrainerRank:
    return TrainerRank(0, 1, "127.0.0.1", 0, str(model_dir), dtype, 1, "cpu", 4096)


def set_scale(directory: Path, value: float) -> None:
    path = directory / "state.json"
    state = json.loads(path.read_text()) | {"loss_scale": {"value": value, "good_updates": 0}}
    path.write_text(json.dumps(state))


def test_an_overflow_costs_few_updates_and_a_resumed_run_goes_on_from_its_scale(
    model_dir: Path, make_sequences, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank = make_rank(model_dir, "float16")
    rank.open_run("run", LoraSettings())
    train(rank, "run", make_sequences(8), SETTINGS)
    rank.save("run", str(tmp_path / "first"))
    set_scale(tmp_path / "first", FAR_TOO_HIGH)
    rank.open_run("run", LoraSettings(), str(tmp_path / "first"))
    with caplog.at_level(logging.WARNING):
        steps = [train(rank, "run", make_sequences(8), SETTINGS)]
        assert (steps[0]["skipped"], steps[0]["loss_scale"]) == (1, FAR_TOO_HIGH), (
            "no overflow to back off from"
        )
        rank.save("run", str(tmp_path / "second"))
        steps += [train(rank, "run", make_sequences(8), SETTINGS) for _ in range(20)]
    first_good = next(number for number, step in enumerate(steps) if step["updated"])
    assert 1 < first_good < 20
    assert [step["loss_scale"] for step in steps[: first_good + 1]] == [
        FAR_TOO_HIGH / 2**number for number in range(first_good + 1)
    ]
    said = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert len(said) == sum(step["skipped"] for step in steps)
    assert "step 2 was skipped" in said[0]
    assert "from 1.07374e+09 to 5.36871e+08" in said[0]
    again = make_rank(model_dir, "float16")
    again.open_run("run", LoraSettings(), str(tmp_path / "second"))
    resumed = [train(again, "run", make_sequences(8), SETTINGS) for _ in range(20)]
    assert [step["loss_scale"] for step in resumed] == [step["loss_scale"] for step in steps[1:]]


def test_other_precisions_have_no_scale_and_old_checkpoints_start_with_the_first(
    model_dir: Path, make_sequences, tmp_path: Path
) -> None:
    rank = make_rank(model_dir, "float32")
    rank.open_run("run", LoraSettings())
    rank.save("run", str(tmp_path))
    set_scale(tmp_path, FAR_TOO_HIGH)
    rank.open_run("run", LoraSettings(), str(tmp_path))
    metrics = train(rank, "run", make_sequences(8), SETTINGS)
    assert metrics["updated"] == 1
    assert "loss_scale" not in metrics
    state = json.loads((tmp_path / "state.json").read_text())
    del state["loss_scale"]
    (tmp_path / "state.json").write_text(json.dumps(state))
    half = make_rank(model_dir, "float16")
    half.open_run("run", LoraSettings(), str(tmp_path))
    assert train(half, "run", make_sequences(8), SETTINGS)["loss_scale"] == 1024.0
