"""A project of the original trains after `insitu migrate`, with what that says is to be done by hand."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.compare_sides import NUM_EPOCHS, InsituSide, write_project
from tests.support.standin_backend import StandinBackend
from tests.support.standin_engine import Behaviour


@pytest.mark.timeout(90)
async def test_the_migrated_project_trains_with_the_functions_that_it_names(tmp_path: Path) -> None:
    pytest.importorskip("langchain_openai")
    write_project(tmp_path / "project")
    behaviour = Behaviour(texts=["4", "7", "13"])
    async with StandinBackend(tmp_path / "state", behaviour) as backend:
        ports = (backend.port, "tiny", backend.gateway_port)
        side = InsituSide(tmp_path / "project", "moved", *ports)
        report = side.migrate()
        assert [note["path"] for note in report["by_hand"]] == [
            "workflow._type",
            "eval.evaluators.my_reward._type",
        ]
        assert report["loads"] is False
        exit_code = await asyncio.to_thread(side.finish, 80)
        assert exit_code == 0, side.log.read_text()
        steps = backend.ledger.steps("moved")
        rates = {backend.ledger.get_job(step.job_id).settings.learning_rate for step in steps}
    assert len(steps) == NUM_EPOCHS
    assert rates == {1e-3}, "the learning rate of the file is the one that is used"
    epochs = side.epochs()
    assert [epoch["num_trajectories"] for epoch in epochs] == [6 * 4] * NUM_EPOCHS
    validations = side.read_json("validation_history.json")
    scheduled = [entry["num_examples"] for entry in validations if not entry.get("remeasured")]
    assert scheduled == [3] * (NUM_EPOCHS + 1)
    json.dumps(epochs, allow_nan=False)
