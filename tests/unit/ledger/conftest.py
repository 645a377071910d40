from __future__ import annotations

from collections.abc import Iterator

import pytest

from insitu.backend.ledger import Ledger
from insitu.types import LoraSettings, Trajectory, TrajectoryGroup


@pytest.fixture
def ledger(database_url: str) -> Iterator[Ledger]:
    with Ledger(database_url) as opened:
        opened.register_run("project", "run", "model", LoraSettings(), {}, {})
        yield opened


@pytest.fixture
def make_group():
    def make(group_id: str, run: str = "run", size: int = 2) -> TrajectoryGroup:
        rollouts = [Trajectory(f"{group_id}-{i}", [f"call-{group_id}-{i}"], float(i)) for i in range(size)]
        return TrajectoryGroup(group_id, run, rollouts)

    return make
