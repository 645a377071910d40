"""Plots: reward_plot.png, the rewards and the curriculum over the epochs."""

# matplotlib's own types leave keyword arguments untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from insitu.harness.files.metrics import EpochLine, ValidationEntry
from insitu.system.durable import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Epochs: TypeAlias = Sequence[EpochLine]
Validations: TypeAlias = Sequence[ValidationEntry]
Points: TypeAlias = Sequence[tuple[float, float | None]]
"""Epochs and values."""

_DOTS_PER_INCH = 150
_SIZE_INCHES = (8.0, 14 / 3)  # 1200 × 700
_TRAINING = "#1f6fb4"
_SELECTED = "#2a9d4a"
_VALIDATION = "#d1495b"
_CURRICULUM = "#8a8d91"
_FEW_POINTS = 60
"""With more points, markers would hide the lines."""


def write_plot(path: Path, epochs: Epochs, validations: Validations, title: str) -> None:
    """Draw the plot and replace the image at `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = make_figure(epochs, validations, title)
    picture = io.BytesIO()
    FigureCanvasAgg(figure).print_png(picture)
    write_atomic(path, picture.getvalue())


def make_figure(epochs: Epochs, validations: Validations, title: str) -> Figure:
    """Plot the rewards on the left axis and the curriculum on the right; missing values leave a gap."""
    from matplotlib.figure import Figure

    # Not pyplot's figure: no global state, nothing to close, safe in any thread.
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    rewards = figure.add_subplot()
    shares = rewards.twinx()
    _draw_curriculum(shares, epochs)
    _draw_rewards(rewards, epochs, validations)
    _lay_out(rewards, shares, title)
    positions = [*(line["epoch"] for line in epochs), *map(_position, validations)] or [0]
    rewards.set_xlim(min(positions) - 0.5, max(positions) + 0.5)
    return figure


def _draw_rewards(axes: Axes, epochs: Epochs, validations: Validations) -> None:
    collected = _in_order([(line["epoch"], line.get("avg_reward")) for line in epochs])
    selected = _in_order([(line["epoch"], line.get("filtered_avg_reward")) for line in epochs])
    again = [entry for entry in validations if entry.get("remeasured")]
    validations = [entry for entry in validations if not entry.get("remeasured")]
    validated = _in_order([(_position(entry), entry.get("avg_reward")) for entry in validations])
    curves = [
        ("training: all groups", collected, _TRAINING, "-", "o"),
        ("training: groups trained on", selected, _SELECTED, ":", "s"),
        ("validation", validated, _VALIDATION, "--", "D"),
    ]
    for label, (positions, values), colour, style, marker in curves:
        if not any(map(math.isfinite, values)):
            continue
        line = axes.plot(positions, values, label=label, color=colour, linestyle=style, marker=marker)[0]
        line.set_markersize(4.5)
        line.set_linewidth(1.8)
        if len(values) > _FEW_POINTS:
            line.set_linewidth(1.3)
            line.set_markevery(_between_gaps(values))
    _draw_errors(axes, validations, _VALIDATION)
    if again:
        points = [(_position(entry), entry["avg_reward"] or math.nan) for entry in again]
        label = "best, measured again"
        axes.plot(*zip(*points, strict=True), "D", label=label, markerfacecolor="white", color=_VALIDATION)
        _draw_errors(axes, again, _VALIDATION)
    everything = [value for _, (_, values), *_ in curves for value in values if math.isfinite(value)]
    if len(set(everything)) == 1:
        room = 0.1 * max(1.0, abs(everything[0]))
        axes.set_ylim(everything[0] - room, everything[0] + room)


def _draw_errors(axes: Axes, validations: Validations, colour: str) -> None:
    """Draw a standard error up and down from each validation that has one."""
    for entry in validations:
        reward, error = entry.get("avg_reward"), entry.get("standard_error")
        if reward is not None and error:
            axes.errorbar(_position(entry), reward, error, color=colour, capsize=2.5, linewidth=0.9)


def _draw_curriculum(axes: Axes, epochs: Epochs) -> None:
    positions, shares = _in_order([(line["epoch"], line.get("curriculum_percentile")) for line in epochs])
    if not any(map(math.isfinite, shares)):
        axes.set_visible(False)
        return
    # Each step is as wide as its epoch, including the first and the last.
    edges = [positions[0] - 0.5, *positions, positions[-1] + 0.5]
    percent = [100 * share for share in (shares[0], *shares, shares[-1])]
    label = "curriculum: share of groups (right)"
    axes.plot(edges, percent, drawstyle="steps-mid", label=label, color=_CURRICULUM, linewidth=1.2)
    if min(share for share in shares if math.isfinite(share)) < 1:
        axes.fill_between(edges, 0, percent, step="mid", color=_CURRICULUM, alpha=0.12, linewidth=0)


def _lay_out(rewards: Axes, shares: Axes, title: str) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    rewards.set_title(title, fontsize=11, loc="left", parse_math=False)
    rewards.set_xlabel("epoch")
    rewards.set_ylabel("mean reward")
    rewards.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=13, steps=[1, 2, 5, 10]))
    rewards.margins(y=0.12)
    rewards.grid(visible=True, alpha=0.25, linewidth=0.6)
    rewards.spines[["top", "right"]].set_visible(False)
    shares.spines["top"].set_visible(False)
    shares.set_ylim(0, 103)  # so that a line at 100 % is not half hidden
    shares.set_yticks(range(0, 101, 20))
    shares.set_ylabel("groups within the curriculum", color=_CURRICULUM)
    shares.yaxis.set_major_formatter(PercentFormatter(decimals=0))
    shares.tick_params(axis="y", colors=_CURRICULUM)
    # Draw the rewards over the shaded curriculum.
    rewards.set_zorder(shares.get_zorder() + 1)
    rewards.patch.set_visible(False)
    _legend(rewards, shares)


def _legend(rewards: Axes, shares: Axes) -> None:
    handles, labels = rewards.get_legend_handles_labels()
    if shares.get_visible():
        more_handles, more_labels = shares.get_legend_handles_labels()
        handles, labels = handles + more_handles, labels + more_labels
    if handles:
        # Below the picture, where it hides nothing.
        rewards.figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def _position(entry: ValidationEntry) -> float:
    """Return the number of epochs before a validation, with the share of the one that was under way."""
    return entry["epoch"] + entry.get("pass_share", 0)


def _in_order(points: Points) -> tuple[list[float], list[float]]:
    """Return epochs and values in order, each position once; NaN for a missing value leaves a gap."""
    last = dict(points)
    values = [last[epoch] for epoch in sorted(last)]
    return sorted(last), [math.nan if value is None else float(value) for value in values]


def _between_gaps(values: Sequence[float]) -> list[int]:
    """Return the positions of isolated values, which no line segment would show."""
    padded = [math.nan, *values, math.nan]
    return [
        position
        for position, (before, value, after) in enumerate(zip(padded, values, padded[2:], strict=False))
        if math.isfinite(value) and not math.isfinite(before) and not math.isfinite(after)
    ]
