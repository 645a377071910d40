"""kill -9 of an asynchronous `insitu finetune` after every event of its journal: nothing lost, nothing twice.

The same command is started again and again. It kills itself as soon as one more event is on the disk, while
rollouts, a step and a validation run beside each other. With `INSITU_TESTS=long` the run has two epochs, and
another one is killed up to half a second after an event.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from insitu.types import JobState
from tests.support.finetuning import Project
from tests.support.standin_backend import StandinBackend
from tests.support.standin_engine import Behaviour

LONG = os.environ.get("INSITU_TESTS") == "long"
NUM_EPOCHS = 2 if LONG else 1
NUM_EXAMPLES = 6
GROUPS_PER_STEP = 2
NUM_GENERATIONS = 2
MAX_STALENESS = 1
ARGUMENTS = ("--validation_dataset=validation.json", "--validation_interval=1", "--validation_steps=2")
RUN_SECONDS = 120.0
KINDS = {"admitted", "submitted", "step", "epoch", "validating", "validated", "best", "ended"}
KILLED_AFTER_EVENT = """
import os, signal, threading
from insitu.cli import main
from insitu.harness.files.journal import Journal

append, delay = Journal.append, os.environ["KILL_DELAY"]

def append_and_die(self, kind, fields):
    record = append(self, kind, fields)
    if delay and float(delay):
        threading.Timer(float(delay), os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif delay:
        os.kill(os.getpid(), signal.SIGKILL)
    return record

Journal.append = append_and_die
main()
"""
"""The command; the event is on the disk when it dies, and nothing that follows from it has happened."""

Slot = tuple[int, int, int]
"""Epoch, the example's position and the generation: one rollout that the run needs."""


class KilledRun:
    """One run, and what is known of it from the kills so far."""

    def __init__(self, directory: Path, backend: StandinBackend) -> None:
        self.state_dir = backend.state_dir
        self.kept: dict[Slot, str] = {}
        """Rollouts that were on the disk at a kill."""
        self.project = Project(directory, backend.port, backend.gateway_url, NUM_EXAMPLES)
        self.project.write_rows("train.json", NUM_EXAMPLES, question={"turns": 2})
        self.project.configure(
            eval={"general": {"max_concurrency": 4}},
            trajectory_builders={"groups": {"num_generations": NUM_GENERATIONS}},
            trainer_adapters={"backend": {"training": {"max_staleness": MAX_STALENESS}}},
            finetuning={
                "num_epochs": NUM_EPOCHS,
                "groups_per_step": GROUPS_PER_STEP,
                "schedule": "asynchronous",
            },
        )

    def events(self) -> list[str]:
        """The kinds of the events in the journal, whole lines only."""
        journal = self.project.output / "journal.jsonl"
        lines = journal.read_bytes().splitlines(keepends=True) if journal.exists() else []
        return [json.loads(line)["event"] for line in lines if line.endswith(b"\n")]

    def on_disk(self, folder: str) -> dict[Slot, list[str]]:
        """The rollouts for training in a folder."""
        found: dict[Slot, list[str]] = defaultdict(list)
        for file in sorted((self.project.output / folder).glob("epoch-*.jsonl")):
            for line in file.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    record = json.loads(line)
                    epoch = int(file.stem.split("-")[1])
                    found[epoch, record["index"], record["generation"]].append(record["rollout_id"])
        return found

    def killed(self) -> None:
        """Look at what a kill has left behind: a rollout may be ahead, in its step's file, or in both."""
        ahead, stored = self.on_disk("ahead"), self.on_disk("trajectories")
        for slot in {*ahead, *stored}:
            rollouts = {*ahead.get(slot, ()), *stored.get(slot, ())}
            assert len(rollouts) == 1, f"{slot} was rolled out twice: {rollouts}"
            (rollout,) = rollouts
            assert self.kept.setdefault(slot, rollout) == rollout, f"{slot} was rolled out again"
        assert self.kept.keys() <= {*ahead, *stored}, "a rollout was lost"

    def check_finished(self) -> None:
        """Everything that the run should have done it has done once."""
        stored = self.on_disk("trajectories")
        assert set(stored) == {
            (e, i, g) for e in range(NUM_EPOCHS) for i in range(NUM_EXAMPLES) for g in range(NUM_GENERATIONS)
        }
        assert all(len(rollouts) == 1 for rollouts in stored.values())
        assert all(stored[slot] == [rollout] for slot, rollout in self.kept.items())
        assert not list((self.project.output / "ahead").iterdir())
        self._check_ledger({rollout for (rollout,) in stored.values()})
        lines = self.project.lines("steps.jsonl")
        used = Counter((line["epoch"], index) for line in lines for index in line["positions"])
        assert used == {(e, i): 1 for e in range(NUM_EPOCHS) for i in range(NUM_EXAMPLES)}
        trained = [line for line in lines if line["step"]]
        assert [line["step"] for line in trained] == list(range(1, len(trained) + 1))
        assert all(line["training"]["staleness/max"] <= MAX_STALENESS for line in trained)
        history = self.project.json("validation_history.json")
        validated = [each["step"] for each in history if "remeasured" not in each]
        assert len(set(validated)) == len(validated), validated
        assert {0, 2, len(trained)} <= set(validated)
        events = Counter(self.events())
        assert events["admitted"] == events["submitted"] == len(trained)
        assert (events["step"], events["epoch"]) == (len(lines), NUM_EPOCHS)

    def _check_ledger(self, rollouts: set[str]) -> None:
        """Every rollout was trained once, or has a reason why it was not."""
        ledger = self.state_dir / "ledger.db"
        jobs = _rows(ledger, "SELECT state, step FROM jobs ORDER BY seq")
        assert jobs == [(JobState.SUCCEEDED, number + 1) for number in range(len(jobs))]
        query = (
            "SELECT rollout_id FROM rollouts r JOIN groups g ON g.id = group_id WHERE g.state = 'consumed'"
        )
        trained = Counter(rollout for (rollout,) in _rows(ledger, query))
        assert set(trained.values()) == {1}
        dropped = [json.loads(file.read_text()) for file in (self.project.output / "left_out").iterdir()]
        reasons = {rollout: reason for each in dropped for rollout, reason in each.items()}
        assert trained.keys() | reasons.keys() == rollouts
        assert not trained.keys() & reasons.keys()
        assert set(reasons.values()) <= {"stale"}


def _rows(database: Path, query: str) -> list[Any]:
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def _start(run: KilledRun, delay: float | None) -> str | None:
    """Run until one more event is noted; return its kind, None if the run ended. No `delay`: no kill."""
    known = len(run.events())
    ran = subprocess.run(
        [sys.executable, "-c", KILLED_AFTER_EVENT, *run.project.command(*ARGUMENTS)[3:]],
        cwd=run.project.path,
        env={**os.environ, "KILL_DELAY": "" if delay is None else str(delay)},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    if ran.returncode == -signal.SIGKILL:
        return run.events()[known]
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Finished." in ran.stdout + ran.stderr
    return None


@pytest.mark.timeout(1200 if LONG else 600)
@pytest.mark.parametrize("most_seconds", [0.0, 0.5] if LONG else [0.0])
async def test_a_run_is_killed_after_every_event(tmp_path: Path, most_seconds: float) -> None:
    seed = int(os.environ.get("INSITU_TEST_SEED") or time.time_ns() % 2**32)
    print(f"INSITU_TEST_SEED={seed}")
    chance = random.Random(seed)
    behaviour = Behaviour(delay_seconds=(0.03, 0.2))
    backend = StandinBackend(tmp_path / "state", behaviour, train_seconds=0.3, hold_calls=False)
    async with backend:
        run, killed_after = KilledRun(tmp_path / "run", backend), list[str]()
        while "ended" not in run.events():
            kind = await asyncio.to_thread(_start, run, chance.uniform(0, most_seconds))
            if kind is not None:
                killed_after.append(kind)
                run.killed()
        assert await asyncio.to_thread(_start, run, None) is None
        run.check_finished()
        print(f"{len(killed_after)} kills, after {', '.join(killed_after)}")
        if not most_seconds:
            assert killed_after == run.events()[:-1], "the last run notes its end again"
            assert set(killed_after) >= KINDS
