"""`GET /ready`: 200 when calls and steps can be sent, else every cause."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from insitu.backend.api import health

READY: dict[str, Any] = {
    "state": "ready",
    "waiting": None,
    "gateway": {"epoch": 3},
    "model": "smollm2",
    "replicas": {"replica-0": {"pid": 1, "joined": False}, "replica-1": {"pid": 2, "joined": True}},
    "trainer": [{"rank": 0, "pid": 3, "device": "cpu"}],
}


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., None]:
    def write(**changes: Any) -> None:
        (tmp_path / "status.json").write_text(json.dumps(READY | changes))

    return write


async def test_a_backend_that_can_serve_and_train_is_ready(stranger, report) -> None:
    report()
    answer = await stranger.get("/ready")
    assert (answer.status_code, answer.json()) == (200, {"ready": True, "causes": []})


async def test_a_stopped_trainer_is_no_cause_since_the_next_step_starts_it(stranger, report) -> None:
    report(trainer=[])
    assert (await stranger.get("/ready")).status_code == 200


@pytest.mark.parametrize(
    ("changes", "causes"),
    [
        ({"state": "starting"}, ["the backend is starting"]),
        ({"model": None, "replicas": {}}, ["no model is loaded: the first registration loads one"]),
        ({"replicas": {"replica-0": {"pid": 1, "joined": False}}}, ["no engine takes calls"]),
        ({"gateway": None}, ["the gateway does not answer"]),
        ({"gateway": {"epoch": None}}, ["the gateway has no routing table"]),
        ({"waiting": "the disk is full"}, ["training waits: the disk is full"]),
        ({"replicas": {}, "gateway": None}, ["no engine takes calls", "the gateway does not answer"]),
    ],
)
async def test_every_cause_is_said(stranger, report, changes: dict[str, Any], causes: list[str]) -> None:
    report(**changes)
    answer = await stranger.get("/ready")
    assert (answer.status_code, answer.json()) == (503, {"ready": False, "causes": causes})


async def test_without_a_report_nothing_is_ready(stranger, tmp_path: Path) -> None:
    answer = await stranger.get("/ready")
    assert (answer.status_code, answer.json()["causes"]) == (503, ["the supervisor has reported nothing yet"])
    (tmp_path / "status.json").write_text("[]")
    assert (await stranger.get("/ready")).json()["causes"] == ["status.json is not an object"]


async def test_an_old_report_does_not_count(stranger, report, tmp_path: Path) -> None:
    report()
    then = time.time() - 100
    os.utime(tmp_path / "status.json", (then, then))
    (cause,) = (await stranger.get("/ready")).json()["causes"]
    assert cause.startswith("the supervisor has reported nothing for 10")


async def test_a_ledger_that_cannot_be_written_is_a_cause(
    stranger, report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process holds the write lock: reading goes on, so `/health` answers 200."""
    report()
    monkeypatch.setattr(health, "_LEDGER_SECONDS", 0.2)
    holder = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    try:
        answer = await stranger.get("/ready")
        assert (await stranger.get("/health")).status_code == 200
    finally:
        holder.execute("ROLLBACK")
        holder.close()
    assert answer.status_code == 503
    (cause,) = answer.json()["causes"]
    assert "ledger write" in cause
