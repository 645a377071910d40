"""The picture shows what happened: three different curves, gaps, and the real curriculum."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from insitu.harness.files.plots import make_figure, write_plot

SHARES = [0.3, 0.3, 0.5, 0.7]
EPOCHS = [
    {
        "epoch": n,
        "avg_reward": n / 10,
        "filtered_avg_reward": 0.5 + n / 20,
        "curriculum_percentile": SHARES[n],
    }
    for n in range(4)
]
VALIDATIONS: list[dict[str, Any]] = [
    {"epoch": 0, "avg_reward": 0.05},
    {"epoch": 2, "avg_reward": None},
    {"epoch": 4, "avg_reward": 0.4},
]


def curves(figure: Figure) -> dict[str, Line2D]:
    return {str(line.get_label()): line for axes in figure.axes for line in axes.get_lines()}


def data(line: Line2D) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for one in figure.legends for text in one.get_texts()]


def test_three_curves_with_their_own_values() -> None:
    drawn = curves(make_figure(EPOCHS, VALIDATIONS, "title"))
    assert data(drawn["training: all groups"]) == [(n, n / 10) for n in range(4)]
    assert data(drawn["training: groups trained on"]) == [(n, 0.5 + n / 20) for n in range(4)]
    assert data(drawn["validation"])[0] == (0, 0.05)
    assert data(drawn["validation"])[-1] == (4, 0.4)


def test_failed_validation_leaves_a_gap_and_is_not_zero() -> None:
    x, y = data(curves(make_figure(EPOCHS, VALIDATIONS, "title"))["validation"])[1]
    assert x == 2
    assert math.isnan(y)


def test_curriculum_is_drawn_as_it_was_on_the_right_axis_in_percent() -> None:
    figure = make_figure(EPOCHS, VALIDATIONS, "title")
    rewards, shares = figure.axes
    (line,) = shares.get_lines()
    at_epochs = {x: y for x, y in data(line) if x == int(x)}
    assert at_epochs == pytest.approx({0: 30, 1: 30, 2: 50, 3: 70})
    assert shares.get_ylim()[0] == 0
    assert list(shares.get_yticks()) == [0, 20, 40, 60, 80, 100]
    assert shares.yaxis.get_major_formatter()(100) == "100%"
    assert shares.yaxis.get_label_position() == "right"
    assert line not in rewards.get_lines()


def test_legend_names_everything_that_is_drawn() -> None:
    assert legend(make_figure(EPOCHS, VALIDATIONS, "title")) == [
        "training: all groups",
        "training: groups trained on",
        "validation",
        "curriculum: share of groups (right)",
    ]


def test_without_validations_there_is_no_curve_for_them() -> None:
    figure = make_figure(EPOCHS, [], "title")
    assert "validation" not in legend(figure)
    failed = make_figure(EPOCHS, [{"epoch": 0, "avg_reward": None}], "title")
    assert "validation" not in legend(failed)


def test_one_epoch_is_visible() -> None:
    figure = make_figure(EPOCHS[:1], [], "title")
    drawn = curves(figure)
    assert drawn["training: all groups"].get_marker() == "o"
    assert figure.axes[0].get_xlim() == (-0.5, 0.5)
    left, *_, right = data(drawn["curriculum: share of groups (right)"])
    assert (left, right) == ((-0.5, 30), (0.5, 30))


def test_flat_rewards_get_room() -> None:
    figure = make_figure([{"epoch": 0, "avg_reward": 0.5}], [], "title")
    assert figure.axes[0].get_ylim() == pytest.approx((0.4, 0.6))


def test_epoch_without_rewards_leaves_a_gap_and_repeated_ones_count_once() -> None:
    epochs = [EPOCHS[1], {"epoch": 0, "avg_reward": None}, {"epoch": 1, "avg_reward": 0.9}]
    values = data(curves(make_figure(epochs, [], "title"))["training: all groups"])
    assert math.isnan(values[0][1])
    assert values[1:] == [(1, 0.9)]


def test_many_epochs_mark_only_values_between_gaps() -> None:
    epochs: list[dict[str, Any]] = [{"epoch": n, "avg_reward": n / 100} for n in range(100)]
    epochs[40]["avg_reward"] = epochs[42]["avg_reward"] = None
    assert curves(make_figure(epochs, [], "title"))["training: all groups"].get_markevery() == [41]


@pytest.mark.parametrize(
    ("epochs", "validations"), [(EPOCHS, VALIDATIONS), (EPOCHS[:1], []), ([], VALIDATIONS[:1]), ([], [])]
)
def test_picture_is_written_whole_in_its_size(
    tmp_path: Path, epochs: list[dict[str, Any]], validations: list[dict[str, Any]]
) -> None:
    path = tmp_path / "reward_plot.png"
    path.write_bytes(b"old")
    write_plot(path, epochs, validations, "costs $5 and x_1 $")
    picture = path.read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">II", picture[16:24]) == (1200, 700)
    assert [p.name for p in tmp_path.iterdir()] == ["reward_plot.png"]


def test_no_global_state_and_no_import_before_use() -> None:
    script = (
        "import sys; from pathlib import Path; from insitu.harness.files.plots import make_figure\n"
        "assert 'matplotlib' not in sys.modules\n"
        "make_figure([{'epoch': 0, 'avg_reward': 1.0}], [], 't')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_validations_have_error_bars_and_the_best_is_shown_again() -> None:
    again = {"epoch": 4, "avg_reward": 0.3, "standard_error": 0.06, "remeasured": True}
    measured = [{**VALIDATIONS[0], "standard_error": 0.02}, *VALIDATIONS[1:]]
    figure = make_figure(EPOCHS, [*measured, again], "title")
    drawn = curves(figure)
    assert data(drawn["validation"])[-1] == (4, 0.4), "the second measurement is a point of its own"
    assert data(drawn["best, measured again"]) == [(4, 0.3)]
    bars = [tuple(bar.get_segments()[0].ravel()) for bar in figure.axes[0].collections]
    assert bars == [pytest.approx((0, 0.03, 0, 0.07)), pytest.approx((4, 0.24, 4, 0.36))]
    assert legend(figure).count("validation") == 1
