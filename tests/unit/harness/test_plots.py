"""The picture says what happened: rewards with their spread, validations with their errors, and the gain."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from insitu.harness.files.plots import make_figure, write_plot

SHARES = [0.3, 0.3, 0.5, 0.7]
STEPS: list[dict[str, Any]] = [
    {
        "epoch": n,
        "step": n + 1,
        "avg_reward": n / 10,
        "min_reward": 0.0,
        "max_reward": 1.0,
        "reward_std": 0.15,
        "filtered_avg_reward": 0.5 + n / 20,
        "curriculum_percentile": 1.0,
    }
    for n in range(4)
]
CURRICULUM = [{**step, "curriculum_percentile": share} for step, share in zip(STEPS, SHARES, strict=True)]
VALIDATIONS: list[dict[str, Any]] = [
    {"epoch": 0, "step": 0, "avg_reward": 0.05, "standard_error": 0.02},
    {"epoch": 2, "step": 2, "avg_reward": None},
    {"epoch": 4, "step": 4, "avg_reward": 0.4},
]
GAIN = {
    "difference": 0.25,
    "low": 0.13,
    "high": 0.37,
    "confidence": 29 / 30,
    "num_examples": 32,
    "num_unpaired": 0,
    "verdict": "better",
}
AGAIN = {"epoch": 4, "step": 4, "avg_reward": 0.3, "standard_error": 0.06, "remeasured": True, "gain": GAIN}
TRAINING, SELECTED = "training reward", "of the groups trained on"
VALIDATION, BEST = "validation (± 2 standard errors)", "best step, measured again"
SPREAD = "spread of a step's rollouts (1 sd)"


def curves(figure: Figure) -> dict[str, Line2D]:
    return {str(line.get_label()): line for axes in figure.axes for line in axes.get_lines()}


def validated(figure: Figure, label: str = VALIDATION) -> list[tuple[float, float]]:
    """The points of the curve with error bars."""
    (found,) = [each for each in figure.axes[0].containers if each.get_label() == label]
    return data(found[0])


def data(line: Line2D) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for one in figure.legends for text in one.get_texts()]


def title(figure: Figure) -> list[str]:
    """The sentence, the line below it, and what marks the best step."""
    axes = figure.axes[0]
    return [axes.get_title(loc="left"), *(text.get_text() for text in axes.texts[::-1])]


def band(axes: Axes) -> PolyCollection:
    (found,) = [each for each in axes.collections if isinstance(each, PolyCollection)]
    return found


def test_training_and_validation_have_their_own_values() -> None:
    figure = make_figure(STEPS, VALIDATIONS, "run")
    assert data(curves(figure)[TRAINING]) == [(n + 1, n / 10) for n in range(4)]
    assert validated(figure)[0] == (0, 0.05)
    assert validated(figure)[-1] == (4, 0.4)
    assert legend(figure) == [SPREAD, TRAINING, VALIDATION]


def test_failed_validation_leaves_a_gap_and_is_not_zero() -> None:
    x, y = validated(make_figure(STEPS, VALIDATIONS, "run"))[1]
    assert x == 2
    assert math.isnan(y)


def test_the_spread_is_a_band_within_the_rewards_there_were() -> None:
    corners = {tuple(point) for point in band(make_figure(STEPS, [], "run").axes[0]).get_paths()[0].vertices}
    for low, high, step in [(0.0, 0.15, 1), (0.0, 0.25, 2), (0.05, 0.35, 3), (0.15, 0.45, 4)]:
        assert any(c == pytest.approx((step, low)) for c in corners)
        assert any(c == pytest.approx((step, high)) for c in corners)


def test_steps_without_a_spread_have_no_band() -> None:
    bare = [{name: value for name, value in step.items() if name != "reward_std"} for step in STEPS]
    assert SPREAD not in legend(make_figure(bare, [], "run")), "steps of earlier releases"


def test_a_curriculum_that_leaves_groups_out_has_a_strip_of_its_own() -> None:
    figure = make_figure(CURRICULUM, VALIDATIONS, "run")
    rewards, shares = figure.axes
    (stairs,) = shares.patches
    assert list(stairs.get_data().values) == pytest.approx([30, 30, 50, 70])
    assert list(stairs.get_data().edges) == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert shares.get_ylim() == (0, 100)
    assert data(curves(figure)[SELECTED]) == [(n + 1, 0.5 + n / 20) for n in range(4)]
    assert (rewards.get_xlabel(), shares.get_xlabel()) == ("", "training step")
    assert len(make_figure(STEPS, VALIDATIONS, "run").axes) == 1
    assert SELECTED not in legend(make_figure(STEPS, VALIDATIONS, "run"))


def test_without_validations_there_is_no_curve_for_them() -> None:
    assert legend(make_figure(STEPS, [], "run")) == [SPREAD, TRAINING]
    failed = [{"epoch": 0, "step": 0, "avg_reward": None}]
    assert VALIDATION not in legend(make_figure(STEPS, failed, "run"))


def test_one_step_is_visible() -> None:
    figure = make_figure(STEPS[:1], [], "run")
    (axes,) = figure.axes
    assert curves(figure)[TRAINING].get_marker() == "o"
    assert axes.get_xlim() == (-0.5, 1.5)
    (bar,) = [each for each in axes.collections if not isinstance(each, PolyCollection)]
    assert bar.get_segments()[0].tolist() == [[1, 0.0], [1, 0.15]]


def test_flat_rewards_get_room() -> None:
    figure = make_figure([{"epoch": 0, "step": 1, "avg_reward": 0.5}], [], "run")
    assert figure.axes[0].get_ylim() == pytest.approx((0.4, 0.6))


def test_a_step_without_rewards_leaves_a_gap_and_one_without_update_has_a_place() -> None:
    steps = [STEPS[0], {"epoch": 1, "step": None, "avg_reward": None}, {**STEPS[1], "step": 2}]
    figure = make_figure(steps, [{"epoch": 3, "step": 2, "avg_reward": 0.4}], "run")
    places, values = zip(*data(curves(figure)[TRAINING]), strict=True)
    assert places == (1, 2, 3)
    assert [math.isnan(value) for value in values] == [False, True, False]
    assert validated(figure) == [(3, 0.4)], "step 2 is the third of the lines"


def test_many_steps_mark_only_values_between_gaps() -> None:
    steps: list[dict[str, Any]] = [{"epoch": n, "step": n + 1, "avg_reward": n / 100} for n in range(100)]
    steps[40]["avg_reward"] = steps[42]["avg_reward"] = None
    assert curves(make_figure(steps, [], "run"))[TRAINING].get_markevery() == [41]


@pytest.mark.parametrize(
    ("steps", "validations"),
    [
        (CURRICULUM, [*VALIDATIONS, AGAIN]),
        (STEPS[:1], []),
        (STEPS * 50, VALIDATIONS),
        ([], VALIDATIONS),
        ([], []),
    ],
)
def test_picture_is_written_whole_in_its_size(
    tmp_path: Path, steps: list[dict[str, Any]], validations: list[dict[str, Any]]
) -> None:
    path = tmp_path / "reward_plot.png"
    path.write_bytes(b"old")
    write_plot(path, steps, validations, "costs $5 and x_1 $")
    picture = path.read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">II", picture[16:24]) == (1200, 700)
    assert [p.name for p in tmp_path.iterdir()] == ["reward_plot.png"]


def test_no_global_state_and_no_import_before_use() -> None:
    script = (
        "import sys; from pathlib import Path; from insitu.harness.files.plots import make_figure\n"
        "assert 'matplotlib' not in sys.modules\n"
        "make_figure([{'epoch': 0, 'step': 1, 'avg_reward': 1.0}], [], 't')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_validations_have_error_bars_and_the_best_is_shown_again() -> None:
    figure = make_figure(STEPS, [*VALIDATIONS, AGAIN], "run")
    assert validated(figure)[-1] == (4, 0.4), "the second measurement is a point of its own"
    assert validated(figure, BEST) == [(4, 0.3)]
    first, again = (each for each in figure.axes[0].containers)
    assert first[2][0].get_segments()[0].ravel() == pytest.approx([0, 0.01, 0, 0.09])
    assert again[2][0].get_segments()[0].ravel() == pytest.approx([4, 0.18, 4, 0.42])
    assert legend(figure) == [SPREAD, TRAINING, VALIDATION, BEST]


@pytest.mark.parametrize(
    ("validations", "said"),
    [
        (
            [*VALIDATIONS, AGAIN],
            [
                "Held-out reward rose from 0.05 to 0.30",
                "difference +0.25, 96.7 % interval +0.13 to +0.37 · run",
                "best: step 4",
            ],
        ),
        (
            [*VALIDATIONS, {**AGAIN, "gain": {**GAIN, "low": -0.01, "verdict": "unclear"}}],
            [
                "Held-out reward: 0.05 before and 0.30 after training, no real difference",
                "difference +0.25, 96.7 % interval -0.01 to +0.37 · run",
                "best: step 4",
            ],
        ),
        (
            [*VALIDATIONS, {**AGAIN, "gain": {**GAIN, "low": None, "high": None, "verdict": "too_few"}}],
            [
                "Held-out reward: 0.05 before and 0.30 after training",
                "too few examples for an interval · run",
                "best: step 4",
            ],
        ),
        (VALIDATIONS, ["Held-out reward: 0.05 before training, 0.40 at step 4", "run", "best: step 4"]),
        (VALIDATIONS[:1], ["Held-out reward: 0.05 before training", "run"]),
        (
            [*VALIDATIONS[:1], {**VALIDATIONS[2], "avg_reward": 0.01}],
            ["Held-out reward: 0.05 before training, and no step is better", "run"],
        ),
        ([], ["Training reward: 0.00 in the first step, 0.30 in the last", "run"]),
    ],
)
def test_the_title_is_the_result_in_a_sentence(validations: list[dict[str, Any]], said: list[str]) -> None:
    assert title(make_figure(STEPS, validations, "run")) == said


def test_without_rewards_the_title_is_the_run() -> None:
    assert title(make_figure([], [], "run")) == ["run", ""]
