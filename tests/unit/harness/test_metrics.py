"""The metrics files: every epoch once, valid JSON, nothing invented."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from insitu.config.curriculum import CurriculumConfig
from insitu.harness.files.metrics import append_step, write_metrics, write_steps
from insitu.harness.loop.curriculum import initial_state, select
from insitu.harness.loop.metrics import epoch_line, statistics, step_line
from insitu.harness.rollouts.episode import Trajectory, TrajectoryCollection
from insitu.types import Ending

CURRICULUM = {
    "current_percentile": 0.5,
    "last_expansion_epoch": 4,
    "total_groups": 10,
    "included_groups": 5,
    "config": {"enabled": True},
}


AT = "2026-01-01T00:00:00+00:00"
NUMBERS = itertools.count()


def trajectory(reward: float | None, ending: Ending = Ending.COMPLETED) -> Trajectory:
    return Trajectory(f"r{next(NUMBERS)}", "e", 0, ending, reward, call_ids=["c"])


def epoch(number: int, **more: Any) -> dict[str, Any]:
    return {
        "epoch": number,
        "timestamp": AT,
        "run_id": "run_0000abcd",
        **statistics([[trajectory(0.0), trajectory(1.0)]]),
        **{f"filtered_{name}": value for name, value in statistics([[trajectory(1.0)]]).items()},
        "curriculum_percentile": 0.3,
        "curriculum_state": {"current_percentile": 0.3},
        "account": {"total": 2},
        "step": number + 1,
        "loss/mean": 0.25,
        **more,
    }


def strict_json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def lines(directory: Path) -> list[dict[str, Any]]:
    return [strict_json(line) for line in (directory / "training_metrics.jsonl").read_text().splitlines()]


def test_statistics_are_over_rewarded_trajectories_only() -> None:
    groups = [
        [trajectory(0.25), trajectory(None, Ending.TIMEOUT)],
        [trajectory(0.75), trajectory(math.nan)],
        [],
    ]
    assert statistics(groups) == {
        "avg_reward": 0.5,
        "min_reward": 0.25,
        "max_reward": 0.75,
        "num_trajectories": 4,
        "num_groups": 2,
    }


@pytest.mark.parametrize("groups", [[], [[]], [[trajectory(None, Ending.TOOL_ERROR)]]])
def test_no_reward_is_not_zero(groups: list[list[Trajectory]]) -> None:
    made = statistics(groups)
    assert made["avg_reward"] is None
    assert made["min_reward"] is None
    assert made["max_reward"] is None
    assert made["num_trajectories"] == sum(map(len, groups))


def test_an_epochs_line_tells_collected_and_selected_groups_apart() -> None:
    off = CurriculumConfig()
    groups = [[trajectory(1.0), trajectory(0.5)], [trajectory(0.0), trajectory(0.0)]]
    selection = select(groups, 3, off, initial_state(off), 0)
    line = epoch_line(
        [step_line(TrajectoryCollection(groups, "run_0000abcd", 3), selection, curriculum=False)]
    )
    assert (line["epoch"], line["run_id"], line["step"]) == (3, "run_0000abcd", None)
    assert (line["avg_reward"], line["num_trajectories"], line["num_groups"]) == (0.375, 4, 2)
    assert (line["filtered_avg_reward"], line["filtered_num_trajectories"]) == (0.75, 2)
    assert (line["filtered_min_reward"], line["filtered_max_reward"]) == (0.5, 1.0)
    assert line["filtered_num_groups"] == line["curriculum_state"]["included_groups"] == 1
    assert line["curriculum_percentile"] == 1.0
    assert line["account"]["dropped"] == {"zero_variance": 2}


def test_an_epochs_line_sums_up_its_steps() -> None:
    off = CurriculumConfig()
    parts = [
        [[trajectory(1.0), trajectory(0.5), trajectory(0.0)], [trajectory(0.25), trajectory(None)]],
        [[trajectory(0.0), trajectory(0.0)]],
        [[trajectory(0.5), trajectory(1.0)]],
    ]
    whole = [group for groups in parts for group in groups]
    selection = select(whole, 3, off, initial_state(off), 0)
    wanted = epoch_line(
        [step_line(TrajectoryCollection(whole, "run_0000abcd", 3), selection, curriculum=False)]
    )
    steps = []
    for number, groups in enumerate(parts):
        collection = TrajectoryCollection(groups, "run_0000abcd", 3, step=number)
        chosen = select(groups, 3, off, initial_state(off), 0)
        steps.append(step_line(collection, chosen, curriculum=False, refilled=number))
    steps[0] |= {"step": 7, "training": {"loss": 1.0, "account/calls": 3.0, "mismatch/kl": None}}
    steps[2] |= {"step": 8, "training": {"loss": 2.0, "account/calls": 2.0, "mismatch/kl": 0.5}}
    line = epoch_line(steps)
    assert line["step"] == 8
    assert line.get("training") == {"loss": 1.5, "account/calls": 5.0, "mismatch/kl": 0.5}
    assert line["account"].get("refilled") == 3
    assert line["account"]["line"].startswith(
        "trained 5/9: 2 zero-variance, 1 failed, 1 too-small; 3 groups refilled"
    )
    for name in ("num_trajectories", "num_groups", "min_reward", "max_reward", "filtered_num_groups"):
        assert line[name] == wanted[name], name
    for name in ("avg_reward", "filtered_avg_reward"):
        assert line[name] == pytest.approx(wanted[name]), name
    for name in ("total", "trained", "dropped", "endings", "calls"):
        assert line["account"][name] == wanted["account"][name], name


def test_steps_are_appended_and_written_afresh(tmp_path: Path) -> None:
    for number in range(3):
        append_step(tmp_path, {"epoch": 0, "step": number + 1})  # pyright: ignore
    with (tmp_path / "steps.jsonl").open("ab") as file:
        file.write(b'{"epoch": 0, "st')  # a crash
    write_steps(tmp_path, [epoch(0), epoch(1, **{"mismatch/kl": math.nan})])
    found = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(line["epoch"], line.get("mismatch/kl", 0)) for line in found] == [(0, 0), (1, None)]


def test_training_metrics_have_every_field_and_the_steps_own_figures(tmp_path: Path) -> None:
    write_metrics(tmp_path, [epoch(0)], [], CURRICULUM)
    (line,) = lines(tmp_path)
    assert line == {
        "epoch": 0,
        "timestamp": AT,
        "run_id": "run_0000abcd",
        "avg_reward": 0.5,
        "min_reward": 0.0,
        "max_reward": 1.0,
        "num_trajectories": 2,
        "num_groups": 1,
        "filtered_avg_reward": 1.0,
        "filtered_min_reward": 1.0,
        "filtered_max_reward": 1.0,
        "filtered_num_trajectories": 1,
        "filtered_num_groups": 1,
        "curriculum_percentile": 0.3,
        "curriculum_state": {"current_percentile": 0.3},
        "account": {"total": 2},
        "step": 1,
        "loss/mean": 0.25,
    }


def test_every_epoch_is_there_once_in_order(tmp_path: Path) -> None:
    repeated = [epoch(0), epoch(2), epoch(1, avg_reward=0.1), epoch(1, avg_reward=0.9)]
    for _ in range(2):  # writing again adds nothing
        write_metrics(tmp_path, repeated, [], CURRICULUM)
    assert [(line["epoch"], line["avg_reward"]) for line in lines(tmp_path)] == [(0, 0.5), (1, 0.9), (2, 0.5)]
    history = strict_json((tmp_path / "reward_history.json").read_text())
    assert [record["epoch"] for record in history] == [0, 1, 2]
    assert set(history[0]) == {
        "epoch",
        "avg_reward",
        "min_reward",
        "max_reward",
        "filtered_avg_reward",
        "timestamp",
    }


def test_failed_validation_is_null_and_not_zero(tmp_path: Path) -> None:
    validations = [
        {"timestamp": AT, "epoch": 0, "step": 0, "avg_reward": 0.25, "num_examples": 8}
        | {"num_failed": 0, "endings": {"completed": 8}},
        {"timestamp": AT, "epoch": 5, "step": 5, "avg_reward": None, "num_examples": 8}
        | {"num_failed": 8, "endings": {"infrastructure": 8}},
    ]
    write_metrics(tmp_path, [], [*validations, validations[0]], CURRICULUM)
    history = strict_json((tmp_path / "validation_history.json").read_text())
    assert [(v["epoch"], v["step"], v["avg_reward"], v["num_failed"]) for v in history] == [
        (0, 0, 0.25, 0),
        (5, 5, None, 8),
    ]
    assert history[1]["endings"] == {"infrastructure": 8}
    assert set(history[0]) == {
        "epoch",
        "step",
        "avg_reward",
        "num_examples",
        "num_failed",
        "endings",
        "timestamp",
    }


def test_curriculum_state(tmp_path: Path) -> None:
    write_metrics(tmp_path, [], [], {**CURRICULUM, "more": "x"})
    assert strict_json((tmp_path / "curriculum_state.json").read_text()) == CURRICULUM


def test_files_are_valid_json_whatever_the_figures(tmp_path: Path) -> None:
    write_metrics(tmp_path, [epoch(0, **{"mismatch/kl": math.nan, "avg_reward": math.inf})], [], CURRICULUM)
    assert lines(tmp_path)[0]["mismatch/kl"] is None
    assert strict_json((tmp_path / "reward_history.json").read_text())[0]["avg_reward"] is None


def test_what_a_line_lacks_is_null(tmp_path: Path) -> None:
    write_metrics(tmp_path, [{"epoch": 0, "avg_reward": 0.5}], [], CURRICULUM)
    (line,) = lines(tmp_path)
    assert line.keys() == epoch(0).keys() - {"loss/mean"}
    assert (line["avg_reward"], line["step"], line["timestamp"]) == (0.5, None, None)


def test_nothing_yet(tmp_path: Path) -> None:
    write_metrics(tmp_path, [], [], CURRICULUM)
    assert (tmp_path / "training_metrics.jsonl").read_bytes() == b""
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "curriculum_state.json",
        "reward_history.json",
        "training_metrics.jsonl",
        "validation_history.json",
    ]
