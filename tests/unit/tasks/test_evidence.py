"""The evidence: parts by name, results read from files, and a table that says only what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.evidence_part import PLANNED, SETTINGS, TASKS, Part
from benchmarks.evidence_results import greedy, result_of, spread
from benchmarks.evidence_table import BEGIN, END, markdown, write_table

ROOT = Path(__file__).resolve().parents[3]
NUM_EXAMPLES = 8


def line(example: int, success: float, guesses: float) -> dict[str, Any]:
    return {
        "example_id": str(example),
        "reward": success / 2,
        "reasoning": {"success": success, "guesses": guesses},
    }


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A finished run: nothing succeeds before it, all but one example after it, and one rollout failed."""
    rollouts = tmp_path / "trajectories"
    before = [line(example, 0.0, 7.0) for example in range(NUM_EXAMPLES)]
    after = [line(example, float(example > 0), 5.0) for example in range(NUM_EXAMPLES)]
    failed = {"example_id": "0", "reward": None, "reasoning": None}
    write_lines(rollouts / "validation-0000.jsonl", before)
    write_lines(rollouts / "validation-0001-step-000002.jsonl", [*after, failed])
    entries = [
        {"epoch": 0, "step": 0, "avg_reward": 0.0},
        {"epoch": 1, "step": 2, "avg_reward": 0.4, "pass_share": 0.5},
        {"epoch": 1, "step": 2, "avg_reward": 0.9, "remeasured": True},
    ]
    (tmp_path / "validation_history.json").write_text(json.dumps(entries))
    steps = [
        {
            "epoch": 0,
            "step_of_epoch": number,
            "step": number + 1,
            "avg_reward": reward,
            "num_trajectories": 8,
            "num_truncated": 1,
            "timestamp": "2026-01-01T00:00:00+00:00",
        }
        for number, reward in enumerate((0.1, 0.3))
    ]
    write_lines(tmp_path / "steps.jsonl", steps)
    for number in range(2):
        write_lines(rollouts / f"epoch-0000-step-000{number}.jsonl", [line(0, number, 6.0), failed])
    return tmp_path


def result(output: Path, **fields: Any) -> dict[str, Any]:
    about = {"part": "guess-0", "task": "guess", "seed": 0, "settings": "default", "machine": "two cores"}
    return {**about, "complete": True, "minutes": 3.0, **result_of(output), **fields}


# Parts


def test_a_part_goes_by_its_task_seed_and_settings() -> None:
    assert Part.of("guess-1") == Part("guess", 1)
    assert Part.of("sql-0-4x16") == Part("sql", 0, "4x16")
    for name in (*PLANNED, "search-3-trl"):
        assert Part.of(name).name == name


@pytest.mark.parametrize("name", ["chess-0", "guess", "guess-x", "guess-0-best"])
def test_an_unknown_part_is_rejected_with_the_names_to_choose_from(name: str) -> None:
    with pytest.raises(ValueError, match=r"no part is named .* <guess\|tictactoe"):
        Part.of(name)


@pytest.mark.parametrize("task", TASKS)
def test_every_override_names_a_section_of_the_yaml(task: str) -> None:
    configuration = yaml.safe_load((ROOT / "benchmarks" / "tasks" / f"{task}.yml").read_text())
    for overrides in (*SETTINGS.values(), Part(task, 2).overrides):
        for path in overrides:
            section, name, *_ = path.split(".")
            assert name in configuration[section] or section == "finetuning"
    assert configuration["finetuning"]["groups_per_step"] == 8
    assert configuration["trajectory_builders"]["groups"]["num_generations"] == 8


# Results


def test_success_before_and_after_is_read_from_the_rollouts(output: Path) -> None:
    found = result_of(output)
    assert found["before"]["success"] == 0.0
    assert found["after"]["success"] == pytest.approx(7 / 8)
    assert (found["after"]["num_rollouts"], found["after"]["num_failed"]) == (9, 1)
    assert found["after"]["figures"]["guesses"] == 5.0
    assert found["gain"]["difference"] == pytest.approx(7 / 8)
    assert found["gain"]["verdict"] == "better"
    assert [point["success"] for point in found["curve"]] == [0.0, 1.0]
    assert [point["reward"] for point in found["curve"]] == [0.1, 0.3]
    assert found["rollouts"] == 16


def test_more_generations_leave_fewer_groups_without_spread() -> None:
    rewards = {"a": [1.0] + [0.0] * 7, "b": [0.0] * 8, "few": [0.0, 1.0]}
    rollouts = [{"example_id": name, "reward": value} for name, values in rewards.items() for value in values]
    assert spread(rollouts, 2) == pytest.approx((2 / 8 + 0 + 1) / 3)
    assert spread(rollouts, 4) == pytest.approx((4 / 8 + 0) / 2)
    assert spread(rollouts, 8) == pytest.approx((1 + 0) / 2)
    assert spread(rollouts, 9) is None


def test_a_part_that_was_stopped_has_no_gain(output: Path) -> None:
    entries = json.loads((output / "validation_history.json").read_text())
    (output / "validation_history.json").write_text(json.dumps(entries[:1]))
    found = result_of(output)
    assert "before" in found
    assert not {"after", "gain"} & found.keys()


# The table


def test_the_table_says_what_was_measured_and_what_is_missing(output: Path) -> None:
    shown = markdown([result(output)])
    assert "| guess-0 | 0.000 ± 0.000 | 0.875 ± 0.125 | +0.875 (" in shown
    assert "| – | – | 2 | 16 | 3.0 |" in shown
    assert "Machine: two cores." in shown
    assert "| guess-0 | reward | 0.10 0.30 |\n| guess-0 | success | 0.00 1.00 |" in shown
    missing = next(line for line in shown.splitlines() if line.startswith("Not run to their end"))
    assert "guess-0" not in missing
    assert all(name in missing for name in PLANNED if name != "guess-0")


def test_a_stopped_part_is_shown_without_a_result(output: Path) -> None:
    unfinished = {key: value for key, value in result(output).items() if key not in ("after", "gain")}
    shown = markdown([{**unfinished, "complete": False}])
    assert "| guess-0 (stopped) | 0.000 ± 0.000 | not measured | not measured | – | – |" in shown
    assert "guess-0" in shown.splitlines()[-1]


def test_both_models_at_temperature_0_stand_beside_those_at_1(output: Path, tmp_path: Path) -> None:
    for name, success in (("1-base", 0.0), ("2-guess-0-2", 1.0)):
        lines = [json.dumps(line(example, success, 5.0)) for example in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    found = {**result(output), "greedy": greedy(tmp_path)}
    assert "| 0.000 | 1.000 | 2 | 16 | 3.0 |" in markdown([found])
    shots = {"before": {"success": 0.75}, "after": {"success": 1.0}}
    shown = markdown([{**found, "greedy_shots": shots}])
    assert "| 0.000 (0.750 with 8 shots) | 1.000 (1.000 with 8 shots) | 2 | 16 | 3.0 |" in shown


def test_writing_the_table_keeps_the_rest_of_the_page(output: Path, tmp_path: Path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "results"
    results.mkdir()
    (results / "guess-0.json").write_text(json.dumps(result(output)))
    page.write_text(f"# Evidence\n\n{BEGIN}\nold\n{END}\n\nThe end.\n")
    for _ in range(2):
        write_table(page, results)
    text = page.read_text()
    assert text.startswith("# Evidence\n")
    assert text.endswith("The end.\n")
    assert "| guess-0 |" in text
    assert "old" not in text
    assert text.count(BEGIN) == text.count(END) == 1


def test_a_page_without_a_place_for_the_table_is_rejected(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Nothing\n")
    with pytest.raises(SystemExit, match="no place for the table"):
        write_table(page, tmp_path)
