"""The result of `insitu eval` as lines."""

from __future__ import annotations

from insitu.harness.gains.comparison import Comparison, MeasuredModel
from insitu.harness.gains.measurement import plus_minus
from insitu.harness.screen.safe_output import printable


def comparison_lines(comparison: Comparison) -> list[str]:
    """Return a table with a line per model, and the sentence."""
    sides = (comparison.before, comparison.after)
    rows = [("model", "mean reward", "rollouts", "failed"), *map(_row, sides)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    table = [
        "  ".join(
            [row[0].ljust(widths[0]), row[1].ljust(widths[1]), row[2].rjust(widths[2]), row[3]]
        ).rstrip()
        for row in rows
    ]
    return [*table, "", printable(comparison.sentence)]


def _row(model: MeasuredModel) -> tuple[str, str, str, str]:
    mean = model.measurement.mean
    reward = "none" if mean is None else plus_minus(mean, model.measurement.standard_error)
    scored = ("completed", "length")
    kinds = [f"{count} {ending}" for ending, count in sorted(model.endings.items()) if ending not in scored]
    failed = f"{model.num_failed} ({', '.join(kinds)})" if kinds else str(model.num_failed)
    return printable(model.name), reward, str(model.num_rollouts), failed
