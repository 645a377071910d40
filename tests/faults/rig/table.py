"""The table of docs/reliability.md, from the results on file."""

from __future__ import annotations

import json
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent.parent / "docs" / "reliability.md"
_BEGIN, _END = "<!-- table: written by tests.faults.rig --table -->", "<!-- end of the table -->"
_FAULTS = {
    "kills": "`kill -9` of the whole backend",
    "power": "power cut",
    "times": "`kill -9` at a random time",
}


def table(results: Path) -> str:
    """Return a row for each part on file."""
    lines = ["| fault | publication | points | faults | passed | minutes |", "|---|---|---|---|---|---|"]
    for path in sorted(results.glob("*.json")):
        found = json.loads(path.read_text())
        fault, _, publication = path.stem.partition("-")
        outcomes = [what for point in found["points"].values() for what in point["outcomes"].values()]
        points = f"{len(found['points'])} of {found['num_points']}"
        passed = sum(what is None for what in outcomes)
        minutes = f"{found['seconds'] / 60:.0f}"
        cells = (_FAULTS[fault], f"`{publication}`", points, str(len(outcomes)), str(passed), minutes)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_table(results: Path, page: Path = PAGE) -> None:
    """Replace the table of the page."""
    before, _, rest = page.read_text().partition(_BEGIN)
    after = rest.partition(_END)[2]
    page.write_text(f"{before}{_BEGIN}\n\n{table(results)}\n\n{_END}{after}")
