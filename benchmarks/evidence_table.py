"""Table: the results on file as Markdown, and the planned parts that were not run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.evidence_pairs import compared
from benchmarks.evidence_part import PLANNED, TASKS
from insitu.harness.gains.measurement import plus_minus

BEGIN = "<!-- table: written by benchmarks/evidence.py --table -->"
END = "<!-- end of the table -->"
Result = Mapping[str, Any]


def write_table(page: Path, results: Path) -> None:
    """Replace what stands between the marks of the page by the results of this directory."""
    text = page.read_text()
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise SystemExit(f"{page} has no place for the table: it needs the lines {BEGIN} and {END}")
    known = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    page.write_text(f"{before}{BEGIN}\n\n{markdown(known)}\n{END}{after}")


def markdown(results: Iterable[Result]) -> str:
    """Return the summary, the curves and the missing parts."""
    known = {result["part"]: result for result in results}
    lines = [
        "| part | success before | success after | difference (95 %) | before, T = 0 | after, T = 0 "
        "| updates | rollouts | minutes |",
        "|---|---|---|---|---|---|---|---|---|",
        *map(_row, known.values()),
        "",
        "| part | mean of each step's rollouts | step 1, 2, … |",
        "|---|---|---|",
        *(_curve(result, figure) for result in known.values() for figure in ("reward", "success")),
        "",
        *(line for task in TASKS for line in compared(list(known.values()), task, "trl")),
    ]
    machines = sorted({result["machine"] for result in known.values()})
    lines.append(f"Machine: {'; '.join(machines) or 'none'}.")
    if missing := [name for name in PLANNED if not known.get(name, {}).get("complete")]:
        lines.append(f"Not run to their end: {', '.join(missing)}.")
    return "\n".join(lines) + "\n"


def _row(result: Result) -> str:
    gain = result.get("gain")
    difference = "not measured"
    if gain is not None:
        difference = f"{gain['difference']:+.3f}"
        if gain["low"] is not None:
            difference += f" ({gain['low']:+.3f} to {gain['high']:+.3f})"
    cells = (
        result["part"] + ("" if result["complete"] else " (stopped)"),
        _success(result.get("before")),
        _success(result.get("after")),
        difference,
        *(_greedy(result, side) for side in ("before", "after")),
        str(sum(point["step"] is not None for point in result["curve"])),
        str(result["rollouts"]),
        f"{result['minutes']:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def _greedy(result: Result, side: str) -> str:
    """Return the success at temperature 0; before training also that with demonstrations in the prompt."""
    if "greedy" not in result:
        return "–"
    shown = f"{result['greedy'][side]['success']:.3f}"
    shots = result.get("greedy_shots")
    return f"{shown} ({shots[side]['success']:.3f} with 8 shots)" if shots else shown


def _success(side: Result | None) -> str:
    return "not measured" if side is None else plus_minus(side["success"], side["standard_error"])


def _curve(result: Result, figure: str) -> str:
    points = " ".join(_figure(point.get(figure)) for point in result["curve"])
    return f"| {result['part']} | {figure} | {points} |"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
