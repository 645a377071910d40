"""Plots: reward_plot.png, one picture of a run that explains itself.

title       held-out reward before and after in a sentence, and the interval of the difference
rewards     training reward of each step over the spread of its rollouts; validations with error bars
curriculum  the share of groups within it, in a strip below; only if it leaves any out
"""

# matplotlib's own types leave keyword arguments untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from insitu.harness.files.metrics import StepLine, ValidationEntry
from insitu.harness.files.plot_title import Headline, best_of, headline
from insitu.system.durable import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Steps: TypeAlias = Sequence[StepLine]
Validations: TypeAlias = Sequence[ValidationEntry]

_DOTS_PER_INCH = 150
_SIZE_INCHES = (8.0, 14 / 3)  # 1200 × 700
# Okabe and Ito's colours, which people with any colour vision tell apart.
_TRAINING = "#0072B2"
_SELECTED = "#009E73"
_VALIDATION = "#D55E00"
_QUIET = "#5f6368"
_FEW_POINTS = 60
"""With more points, markers would hide the lines."""
_LEAST_ROOM = 0.1
"""Rewards that differ by less than this, or by less than this share of their size, are drawn as flat."""
_NUM_ERRORS = 2
"""Length of the error bars, in standard errors."""


def write_plot(path: Path, steps: Steps, validations: Validations, name: str) -> None:
    """Draw the plot and replace the image at `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = make_figure(steps, validations, name)
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    write_atomic(path, picture.getvalue())


def make_figure(steps: Steps, validations: Validations, name: str) -> Figure:
    """Plot the rewards over the steps; missing values leave a gap. `name` is that of the run."""
    from matplotlib.figure import Figure

    # Not pyplot's figure: no global state, nothing to close, safe in any thread.
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH)
    figure.set_layout_engine("constrained", w_pad=0.09, h_pad=0.09)
    selective = any(line.get("curriculum_percentile", 1.0) < 1 for line in steps)
    if selective:
        rewards, shares = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
        _draw_curriculum(shares, steps)
    else:
        rewards = shares = figure.add_subplot()
    _draw_training(rewards, steps, selective=selective)
    places = _places(steps)
    last = max([len(steps), *(_place(entry, places) for entry in validations)])
    _draw_validations(rewards, validations, places)
    _mark_best(rewards, best_of(validations), places, last)
    _lay_out(rewards, shares, last)
    _write_title(rewards, headline(steps, validations), name)
    _write_legend(figure, rewards)
    return figure


def _draw_training(axes: Axes, steps: Steps, *, selective: bool) -> None:
    places = [float(number) for number in range(1, len(steps) + 1)]
    means = [_value(line.get("avg_reward")) for line in steps]
    if not any(map(math.isfinite, means)):
        return
    spreads = [_spread(line) for line in steps]
    alone = _between_gaps(means)
    marked = None if len(steps) <= _FEW_POINTS else alone
    if any(low < high for low, high in spreads):
        lows, highs = [low for low, _ in spreads], [high for _, high in spreads]
        label = "spread of a step's rollouts (1 sd)"
        axes.fill_between(places, lows, highs, color=_TRAINING, alpha=0.16, linewidth=0, label=label)
        for at in alone:  # an area of one point has no width
            axes.vlines(places[at], lows[at], highs[at], color=_TRAINING, alpha=0.16, linewidth=12)
    (line,) = axes.plot(places, means, label="training reward", color=_TRAINING, markevery=marked)
    line.set(linewidth=2.2, marker="o", markersize=5)
    selected = [_value(line.get("filtered_avg_reward")) for line in steps]
    if selective and any(map(math.isfinite, selected)):
        label = "of the groups trained on"
        (line,) = axes.plot(places, selected, label=label, color=_SELECTED, markevery=marked)
        line.set(linewidth=1.6, linestyle=":", marker="s", markersize=4)


def _draw_validations(axes: Axes, validations: Validations, places: Mapping[int, int]) -> None:
    first = [entry for entry in validations if not entry.get("remeasured")]
    again = [entry for entry in validations if entry.get("remeasured")]
    label = f"validation (± {_NUM_ERRORS} standard errors)"
    _draw_points(axes, first, places, label, style="--", face=_VALIDATION, shift=0)
    _draw_points(axes, again, places, "best step, measured again", style="", face="white", shift=7)


def _mark_best(axes: Axes, best: ValidationEntry | None, places: Mapping[int, int], last: float) -> None:
    if best is None or not best["step"]:
        return
    at = _place(best, places)
    axes.axvline(at, color=_VALIDATION, linewidth=1, alpha=0.45, zorder=1)
    side, words = ("right", -6) if at > 0.75 * last else ("left", 6)
    axes.annotate(
        f"best: step {best['step']}",
        (at, 1),
        xytext=(words, -4),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha=side,
        va="top",
        color=_VALIDATION,
        fontsize=11,
    )


def _draw_points(
    axes: Axes,
    validations: Validations,
    places: Mapping[int, int],
    label: str,
    *,
    style: str,
    face: str,
    shift: float,
) -> None:
    """Draw the means with error bars, moved to the right by `shift` points so that none hides another."""
    from matplotlib.transforms import ScaledTranslation

    points = {_place(entry, places): entry for entry in validations}
    means = [_value(points[at].get("avg_reward")) for at in sorted(points)]
    if not any(map(math.isfinite, means)):
        return
    errors = [_NUM_ERRORS * (points[at].get("standard_error") or 0.0) for at in sorted(points)]
    moved = axes.transData + ScaledTranslation(shift / 72, 0, axes.figure.dpi_scale_trans)
    axes.errorbar(
        sorted(points),
        means,
        yerr=errors if any(errors) else None,
        label=label,
        color=_VALIDATION,
        linestyle=style or "none",
        linewidth=1.6,
        marker="D",
        markersize=6.5,
        markerfacecolor=face,
        markeredgewidth=1.4,
        elinewidth=1.4,
        capsize=3.5,
        transform=moved,
        zorder=4,
    )


def _draw_curriculum(axes: Axes, steps: Steps) -> None:
    # Each share is as wide as its step, including the first and the last.
    edges = [number + 0.5 for number in range(len(steps) + 1)]
    percent = [100 * line.get("curriculum_percentile", 1.0) for line in steps]
    axes.stairs(percent, edges, fill=True, color=_QUIET, alpha=0.3, label="curriculum")
    axes.set_ylim(0, 100)
    axes.set_yticks([0, 100], ["0 %", "100 %"])
    axes.set_ylabel("groups in\ncurriculum", fontsize=10, color=_QUIET)


def _lay_out(rewards: Axes, lowest: Axes, last: float) -> None:
    from matplotlib.ticker import MaxNLocator

    for axes in (rewards, lowest):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#9aa0a6")
        axes.tick_params(labelsize=11, colors="#3c4043", length=3)
    rewards.set_ylabel("mean reward", fontsize=12)
    rewards.grid(visible=True, axis="y", color="#dadce0", linewidth=0.8)
    rewards.set_axisbelow(True)
    rewards.margins(y=0.08)
    lowest.set_xlabel("training step", fontsize=12)
    lowest.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=11, steps=[1, 2, 5, 10]))
    room = max(0.5, 0.02 * last)
    rewards.set_xlim(-room, max(1, last) + room)
    low, high = rewards.get_ylim()
    middle = (low + high) / 2
    around = _LEAST_ROOM * max(1.0, abs(middle))
    if high - low < around:  # else a flat run would look like a wild one
        rewards.set_ylim(middle - around, middle + around)


def _write_title(axes: Axes, title: Headline, name: str) -> None:
    sentence = title.sentence or name
    below = " · ".join(filter(None, (title.detail, name if title.sentence else "")))
    axes.set_title(sentence, fontsize=14, fontweight="bold", loc="left", parse_math=False, pad=26)
    note = axes.annotate(below, (0, 1), xytext=(0, 10), xycoords="axes fraction", textcoords="offset points")
    note.set(fontsize=11, color=_QUIET, parse_math=False, annotation_clip=False)


def _write_legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        # Below the picture, where it hides nothing.
        style = {"fontsize": 10, "frameon": False, "handlelength": 2.2, "columnspacing": 1.6}
        columns = len(labels) if len(labels) < 4 else 2
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, **style)


def _places(steps: Steps) -> dict[int, int]:
    """Return the place of each update on the axis: lines that trained nothing have a place too."""
    return {0: 0} | {step: at for at, line in enumerate(steps, 1) if (step := line.get("step")) is not None}


def _place(entry: ValidationEntry, places: Mapping[int, int]) -> float:
    step = entry["step"]
    return float(places.get(step, step))


def _value(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _spread(line: StepLine) -> tuple[float, float]:
    """Return the mean less and plus the standard deviation, within the rewards that there were."""
    mean, spread = _value(line.get("avg_reward")), line.get("reward_std")
    if spread is None or not math.isfinite(mean):
        return mean, mean
    lowest, highest = line.get("min_reward"), line.get("max_reward")
    low = mean - spread if lowest is None else max(mean - spread, lowest)
    return low, mean + spread if highest is None else min(mean + spread, highest)


def _between_gaps(values: Sequence[float]) -> list[int]:
    """Return the positions of isolated values, which no line segment would show."""
    padded = [math.nan, *values, math.nan]
    return [
        position
        for position, (before, value, after) in enumerate(zip(padded, values, padded[2:], strict=False))
        if math.isfinite(value) and not math.isfinite(before) and not math.isfinite(after)
    ]
