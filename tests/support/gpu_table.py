"""The tables of docs/gpus.md. To write them into the page: python -m tests.support.gpu_table"""

from __future__ import annotations

import re
from pathlib import Path

from insitu.backend.plan.devices.machine import Machine
from insitu.backend.plan.layouts import Wanted
from insitu.backend.plan.memory import GIB
from insitu.backend.plan.plan_table import cards_table
from tests.support.known_models import CONFIGS, known_shape

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpus.md"
CARDS = [(1, 24), (1, 48), (1, 80), (2, 24), (4, 24), (2, 80), (8, 80)]
_BLOCK = "<!-- planner: {name} -->\n{table}\n<!-- end -->"


def tables() -> dict[str, str]:
    """Return each table by the name of its block in the page."""
    shapes = [known_shape(name) for name in CONFIGS]
    machines = [Machine(count, gib * GIB) for count, gib in CARDS]
    single = [machine for machine in machines if machine.num_devices == 1]
    return {
        "shared": cards_table(shapes, machines, Wanted()),
        "dedicated": cards_table(
            shapes, [each for each in machines if each.num_devices > 1], Wanted(placement="dedicated")
        ),
        "four bits": cards_table(shapes, single, Wanted(four_bit=True, publication="merged")),
    }


def with_tables(page: str) -> str:
    """Return the page with every block filled in."""
    for name, table in tables().items():
        block = _BLOCK.format(name=name, table=table)
        page, found = re.subn(rf"<!-- planner: {name} -->.*?<!-- end -->", lambda _: block, page, flags=re.S)  # noqa: B023
        assert found == 1, f"{PAGE} has {found} blocks for the table {name!r}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
