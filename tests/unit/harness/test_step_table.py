"""The table on a terminal: rows that fit, what a row tells, and the log that keeps the lines."""

from __future__ import annotations

import io
from pathlib import Path
from typing import cast

import pytest

from insitu.harness.files.metrics import StepLine
from insitu.harness.screen.console import open_progress
from insitu.harness.screen.entries import Course, Line
from insitu.harness.screen.step_table import StepTable, sparkline
from tools.screens import NUM_DONE, draw, steps, validations


def lines_at(width: int) -> list[str]:
    return [line.rstrip() for line in draw(width).export_text(clear=False).splitlines()]


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, lines_at(width))) <= width


def test_rows_at_80_columns() -> None:
    said = lines_at(80)
    assert "step  reward  curve       change  trained  entropy  KL smp    time  verdict" in said
    (row,) = [line for line in said if line.startswith("  14 ")]
    assert row.split()[:2] == ["14", "0.882"]
    assert row.endswith("+0.748      77%    0.361  4.5e-4    41 s  learning")
    assert "   5   0.277  validation ± 0.040, +0.173 since the first, 32 examples x 4" in said
    assert "    52 × tool_error: KeyError: 'result', at agent.py:41 in add (first:" in said
    assert "      `insitu trajectories list output --ending tool_error`" in said, "a command is not broken"
    assert sum("learning" in line for line in said) == NUM_DONE - 7 + 1


def test_a_wide_terminal_has_counts_and_the_change_from_the_last_step() -> None:
    (row,) = [line for line in lines_at(140) if " 14/20 " in line and "run" not in line]
    assert "+0.043  +0.748" in row
    assert "98/128  77%" in row


def test_a_warning_is_told_once_until_it_changes() -> None:
    table, course = StepTable(), Course()
    line = steps(1)[0]
    first = table.render(course.step(line, 20, 1.0), 80).plain
    again = table.render(course.step(line, 20, 1.0), 80).plain
    assert "45% of the rollouts failed" in first
    assert again.count("\n") == 1


def test_a_resumed_run_is_compared_with_its_first_step() -> None:
    lines = steps(4)
    course = Course()
    course.resume(lines[:3], validations(lines)[:1])
    row = course.step(lines[3], 20, 1.0)
    assert len(row.rewards) == 4
    assert row.since_start == pytest.approx(0.103, abs=0.001)
    checked = course.validation(validations(steps(5))[1])
    assert checked is not None
    assert checked.since_start is not None


def test_sparklines() -> None:
    assert sparkline([], 5) == ""
    assert sparkline([0.5, 0.5], 5) == "▄▄"
    assert sparkline([0, 1], 5) == "▁█"
    assert sparkline([0, 0, 1, 1, 2, 2], 3) == "▁▅█"


def test_a_terminal_without_unicode_has_no_curve() -> None:
    text = StepTable(curve=False).render(Course().step(steps(1)[0], 20, 1.0), 80).plain
    assert text.isascii()
    assert "curve" not in text


def test_the_log_keeps_every_line_from_the_first(tmp_path: Path) -> None:
    with open_progress(io.StringIO()) as progress:
        progress.info("Registered before the directory was known")
        progress.opened(tmp_path)
        progress.log("Starting epoch 1 for run run_a1b2c3d4")
        progress.warn("a tool failed")
    said = (tmp_path / "run.log").read_text().splitlines()
    assert [line[20:] for line in said] == [
        "INFO - Registered before the directory was known",
        "INFO - Starting epoch 1 for run run_a1b2c3d4",
        "WARNING - a tool failed",
    ]


def test_a_log_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    out = io.StringIO()
    with open_progress(out) as progress:
        progress.opened(tmp_path / "missing")
        progress.info("hello")
    assert "run.log cannot be written" in out.getvalue()


def test_a_long_warning_breaks_between_words() -> None:
    shown = StepTable().render(Line("WARNING", f"{'word ' * 30}end"), 80).plain.splitlines()
    assert len(shown) == 3
    assert shown[0].startswith("WARNING - word")
    assert max(map(len, shown)) <= 80


@pytest.mark.parametrize(
    ("figures", "shown"),
    [
        ({"mismatch/kl": -1.3e-10}, "KL smp 0"),
        ({"mismatch/kl": -2.4e-3}, "KL smp -2e-3"),
        ({"mismatch/kl": 4.5e-4, "kl/reference": 0.0}, "KL smp 4.5e-4"),
        ({"mismatch/kl": 4.5e-4, "kl/reference": 0.021}, "KL ref 0.021"),
    ],
)
def test_the_distance_keeps_its_title_and_its_column(figures: dict[str, float], shown: str) -> None:
    line = cast(StepLine, steps(1)[0] | {"training": {"loss": 0.1, "entropy": 0.5, **figures}})
    header, row, *_ = StepTable().render(Course().step(line, 20, 1.0), 100).plain.splitlines()
    start = header.index(shown[:6])
    assert f"{header[start : start + 6]} {row[start - 2 : start + 6].strip()}" == shown
