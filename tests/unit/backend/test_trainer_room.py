"""The supervisor knows which runs the trainer's ranks have closed for another, and opens them again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from insitu.backend.fleet.trainer import TrainerGroup
from insitu.backend.plan.compute import Compute
from insitu.backend.plan.settings import ServeSettings
from insitu.types import LoraSettings


class StandinRank:
    """Has room for two runs."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.open: list[str] = []

    def call(self, _method: str, name: str, *args: Any) -> Awaitable[Any]:
        self.calls.append((name, args[0]))
        answer: Any = None
        if name in ("open_run", "start_run"):
            self.open.append(args[0])
        if name == "make_room":
            answer = self.open[:-2]
            del self.open[:-2]
        future = asyncio.get_running_loop().create_future()
        future.set_result(answer)
        return future

    def kill(self) -> None:
        """It has no process."""


@pytest.fixture
def group(tmp_path: Path) -> TrainerGroup:
    compute = Compute("float32", (), 1, None, "")
    made = TrainerGroup(ServeSettings(tmp_path, "cpu", compute, "adapter", "dedicated", "default"), "standin")
    made._actors = [StandinRank(), StandinRank()]  # type: ignore[list-item]
    return made


async def test_closed_runs_are_opened_again(group: TrainerGroup, tmp_path: Path) -> None:
    lora = LoraSettings()
    await group.open_run("a", lora, 5, tmp_path)
    await group.start_run("b", lora, tmp_path, whole=False)
    assert group.opened == {"a": 5, "b": 0}
    await group.open_run("c", lora, 1, tmp_path)
    assert group.opened == {"b": 0, "c": 1}
    await group.open_run("c", lora, 1, tmp_path)
    await group.open_run("a", lora, 5, tmp_path)
    assert group.opened == {"c": 1, "a": 5}
    ranks: Any = group._actors
    assert ranks[0].calls == ranks[1].calls, "every rank does the same"
    assert [run for name, run in ranks[0].calls if name == "open_run"] == ["a", "c", "a"]
    assert ("make_room", "a") not in ranks[0].calls[:2], "a run alone needs none"
