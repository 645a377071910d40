"""Every operation of the trainer has a deadline: ranks that hang are killed; the error names the option."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="trainer ranks are Ray actors")

from insitu.backend.fleet.trainer import TrainerGroup
from insitu.backend.plan.compute import Compute
from insitu.backend.plan.settings import Deadlines, ServeSettings
from insitu.errors import DeadlineExceeded
from insitu.training.packing import Limits
from insitu.types import LoraSettings, StepSettings

SECONDS = 0.05


class StandinHangingActor:
    """Never answers."""

    def __init__(self) -> None:
        self.killed = False

    def call(self, *_: object) -> Awaitable[Any]:
        return asyncio.get_running_loop().create_future()

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize(
    ("deadline", "ask"),
    [
        ("step", lambda group: group.train_step("run", [], StepSettings(), None)),
        ("score", lambda group: group.score("run", [[1, 2]])),
        ("publish", lambda group: group.open_run("run", LoraSettings(), 4, None)),
        ("publish", lambda group: group.save("run", Path("/nowhere"))),
        ("publish", lambda group: group.export_merged("run", Path("/nowhere"))),
        ("handover", lambda group: group.on_device()),
        ("handover", lambda group: group.off_device()),
        ("handover", lambda group: group.forget_run("run")),
    ],
)
async def test_ranks_that_hang_are_killed(
    deadline: str,
    ask: Callable[[TrainerGroup], Awaitable[object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("insitu.backend.fleet.trainer._sent", lambda _packing: [None, None])
    deadlines = replace(Deadlines(), **{deadline: SECONDS})
    compute = Compute("float32", (), 1, None, "")
    settings = ServeSettings(tmp_path, "cpu", compute, "merged", "shared", "default", deadlines=deadlines)
    group = TrainerGroup(settings, "standin")
    actors = [StandinHangingActor(), StandinHangingActor()]
    group._actors = [*actors]  # type: ignore[list-item]
    group.limits, group.opened = Limits(9, None, 64, can_branch=True), {"run": 3}
    async with asyncio.timeout(30):
        with pytest.raises(DeadlineExceeded, match=r"did not finish in 0\.05 s") as raised:
            await ask(group)
    assert raised.value.hint == f"--{deadline}-seconds sets the deadline"
    assert not group.running
    assert group.opened == {}
    assert all(actor.killed for actor in actors)
