"""kill -9 of `insitu finetune` at many points of its life: the same command goes on where it was.

Half of the kills come after a random time, from the first import to the last file; the others as soon as the
journal says that something has happened, between a decision and what follows from it. Eight kills by default,
one after each kind of event; twenty with `INSITU_TESTS=long`, or `make sweeps`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from insitu.types import JobState
from tests.support.finetuning import Project
from tests.support.standin_backend import StandinBackend
from tests.support.standin_engine import Behaviour

NUM_KILLS = 20 if os.environ.get("INSITU_TESTS") == "long" else 8
NUM_EPOCHS = 4
NUM_EXAMPLES = 6
NUM_GENERATIONS = 3
NUM_VALIDATED = 4
NUM_TURNS = 2
MAX_CONCURRENCY = 4
ARGUMENTS = ("--validation_dataset=validation.json", "--validation_interval=2")
VALIDATED = [0, 2, 4]
EVENTS = ("submitted", "epoch", "validated", "best", "remeasured")
START_SECONDS = 1.0
MAX_RUN_SECONDS = 60.0
FILES = {
    *(".lock", "config.json", "journal.jsonl", "training_metrics.jsonl", "steps.jsonl"),
    *("reward_history.json", "validation_history.json", "curriculum_state.json", "reward_plot.png"),
    "alarms.jsonl",
    *("trajectories", "left_out", "run.log"),
}

Slot = tuple[str, int, int]
"""The file, the example's position and the generation: one rollout that the run needs."""


class KilledRun:
    """One run in a directory of its own, and what is known of it from the kills so far."""

    def __init__(self, directory: Path, backend: StandinBackend, name: str) -> None:
        self.name = name
        self.state_dir = backend.state_dir
        self.num_kills = 0
        self.kept: dict[Slot, str] = {}
        """Rollouts that were on the disk at a kill."""
        self.begun: dict[Slot, set[str]] = {}
        """For those: all rollouts that had been begun by then."""
        self.project = Project(directory, backend.port, backend.gateway_url, NUM_EXAMPLES)
        self.project.write_rows("train.json", NUM_EXAMPLES, question={"turns": NUM_TURNS})
        self.project.configure(
            eval={"general": {"max_concurrency": MAX_CONCURRENCY}},
            trajectory_builders={"groups": {"num_generations": NUM_GENERATIONS}},
            trainer_adapters={"backend": {"backend": {"name": name}}},
            finetuning={"num_epochs": NUM_EPOCHS},
        )

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.project.command(*ARGUMENTS),
            cwd=self.project.path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def seconds_left(self, whole_seconds: float) -> float:
        """About how long the rest takes: starting up, and the epochs that are not over."""
        left = 1 - _num_events(self, "epoch") / (NUM_EPOCHS + 1)
        return START_SECONDS + left * (whole_seconds - START_SECONDS)

    def on_disk(self) -> dict[Slot, list[str]]:
        """The rollouts in trajectories/, whole lines only."""
        found: dict[Slot, list[str]] = defaultdict(list)
        for file in sorted(self.project.output.glob("trajectories/*.jsonl")):
            for line in file.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    record = json.loads(line)
                    found[file.stem, record["index"], record["generation"]].append(record["rollout_id"])
        return found

    def recorded(self) -> dict[Slot, Counter[str]]:
        """The rollouts that the gateway has seen, with the number of their calls."""
        found: dict[Slot, Counter[str]] = defaultdict(Counter)
        config = self.project.output / "config.json"
        if not config.exists():
            return found
        run_id = json.loads(config.read_text())["run_id"]
        query = "SELECT rollout_id, count(*) FROM calls WHERE rollout_id LIKE ? GROUP BY rollout_id"
        for rollout_id, count in _rows(self.state_dir / "calls.db", query, f"{run_id}.%"):
            phase, index, generation, _ = rollout_id.removeprefix(f"{run_id}.").split(".")
            named = phase.startswith(("validation", "remeasured"))
            file = phase if named else f"epoch-{int(phase[1:]):04d}"
            found[file, int(index), int(generation)][rollout_id] += count
        return found

    @property
    def best(self) -> dict[str, Any]:
        return [event for event in self.project.lines("journal.jsonl") if event["event"] == "best"][-1]

    @property
    def remeasured(self) -> list[int]:
        """The steps that a finished run has measured again: its best one, unless nothing beat step 0."""
        return [step for step in [self.best["step"]] if step]

    def killed(self) -> None:
        """Look at what a kill has left behind."""
        self.num_kills += 1
        disk, recorded = self.on_disk(), self.recorded()
        lost = [i for slot, begun in recorded.items() for i in begun if i not in disk.get(slot, ())]
        assert len(lost) <= MAX_CONCURRENCY * self.num_kills
        for slot, rollouts in disk.items():
            assert len(rollouts) == 1, f"{slot} was rolled out twice: {rollouts}"
            assert self.kept.setdefault(slot, rollouts[0]) == rollouts[0]
            self.begun.setdefault(slot, set(recorded[slot]))

    async def check_finished(self, backend: StandinBackend) -> None:
        """Everything that the run should have done it has done once."""
        self._check_rollouts()
        self._check_files()
        async with backend.client() as client:
            steps = await client.steps(self.name)
            assert [step.step for step in steps] == list(range(1, NUM_EPOCHS + 1))
            pinned = [each.step for each in await client.checkpoints(self.name) if each.pinned]
            assert pinned == self.remeasured
        ledger = self.state_dir / "ledger.db"
        jobs = _rows(ledger, "SELECT state, step FROM jobs WHERE run = ? ORDER BY seq", self.name)
        assert jobs == [(JobState.SUCCEEDED, step.step) for step in steps]
        groups = _rows(ledger, "SELECT state, step FROM groups WHERE run = ?", self.name)
        assert {state for state, _ in groups} == {"consumed"}
        assert Counter(step for _, step in groups) == {step.step: NUM_EXAMPLES for step in steps}

    def _check_rollouts(self) -> None:
        disk, recorded = self.on_disk(), self.recorded()
        assert set(disk) == {
            *((f"validation-{e:04d}", i, 0) for e in VALIDATED for i in range(NUM_VALIDATED)),
            *((f"remeasured-{s:06d}", i, 0) for s in self.remeasured for i in range(NUM_VALIDATED)),
            *(
                (f"epoch-{e:04d}", i, g)
                for e in range(NUM_EPOCHS)
                for i in range(NUM_EXAMPLES)
                for g in range(NUM_GENERATIONS)
            ),
        }
        assert all(len(rollouts) == 1 for rollouts in disk.values())
        for slot, rollout in self.kept.items():
            assert disk[slot] == [rollout], f"{slot} was on the disk and was rolled out again"
            assert set(recorded[slot]) == self.begun[slot], f"{slot} was begun again after it had ended"
        for (file, *_), (rollout,) in disk.items():
            turns = NUM_TURNS if file.startswith("epoch") else 1
            assert sum(calls[rollout] for calls in recorded.values()) == turns
        redone = sum(len(begun) for begun in recorded.values()) - len(disk)
        assert redone <= MAX_CONCURRENCY * self.num_kills

    def _check_files(self) -> None:
        project = self.project
        assert {path.name for path in project.output.iterdir()} == FILES
        left_out = sorted(path.name for path in (project.output / "left_out").iterdir())
        assert left_out == [f"epoch-{epoch:04d}.json" for epoch in range(NUM_EPOCHS)]
        assert [line["epoch"] for line in project.lines("training_metrics.jsonl")] == list(range(NUM_EPOCHS))
        assert [line["step"] for line in project.lines("training_metrics.jsonl")] == [1, 2, 3, 4]
        assert [line["step"] for line in project.lines("steps.jsonl")] == [1, 2, 3, 4]
        assert [entry["epoch"] for entry in project.json("reward_history.json")] == list(range(NUM_EPOCHS))
        history = project.json("validation_history.json")
        assert [each["epoch"] for each in history if "remeasured" not in each] == VALIDATED
        assert [each["step"] for each in history if "remeasured" in each] == self.remeasured
        events = Counter(event["event"] for event in project.lines("journal.jsonl"))
        assert (events["submitted"], events["epoch"], events["validated"]) == (4, 4, 3)
        assert events["remeasured"] == len(self.remeasured)
        rewards = [each["avg_reward"] for each in history if "remeasured" not in each]
        assert self.best["reward"] == max(rewards)
        picture = (project.output / "reward_plot.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert b"IEND" in picture[-16:]


def _rows(database: Path, query: str, *values: str) -> list[Any]:
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)
    try:
        return connection.execute(query, values).fetchall()
    finally:
        connection.close()


def _num_events(run: KilledRun, event: str) -> int:
    journal = run.project.output / "journal.jsonl"
    return journal.read_bytes().count(b'{"event":"%s"' % event.encode()) if journal.exists() else 0


def _wait_to_kill(run: KilledRun, process: subprocess.Popen[str], delay: float, event: str | None) -> bool:
    """Kill after `delay` seconds, or that long after `event`; False when the run ended before that."""
    known = 0 if event is None else _num_events(run, event)
    deadline = time.monotonic() + MAX_RUN_SECONDS
    while event is not None and process.poll() is None and _num_events(run, event) <= known:
        assert time.monotonic() < deadline, f"no {event} after {MAX_RUN_SECONDS} s"
        time.sleep(0.002)
    try:
        process.wait(delay)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
    return process.returncode == -signal.SIGKILL


def _finish(process: subprocess.Popen[str], timeout: float) -> None:
    try:
        said, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    assert process.returncode == 0, said
    assert "Finished." in said


@pytest.mark.timeout(240)
async def test_the_harness_may_be_killed_at_any_point(tmp_path: Path) -> None:
    seed = int(os.environ.get("INSITU_TEST_SEED") or time.time_ns() % 2**32)
    print(f"INSITU_TEST_SEED={seed}")
    chance = random.Random(seed)
    behaviour = Behaviour(delay_seconds=(0.03, 0.1))
    async with StandinBackend(tmp_path / "state", behaviour, train_seconds=0.3) as backend:
        whole = KilledRun(tmp_path / "whole", backend, "whole")
        began = time.monotonic()
        await asyncio.to_thread(_finish, whole.start(), MAX_RUN_SECONDS)
        whole_seconds = time.monotonic() - began
        await whole.check_finished(backend)
        num_killed, num_runs, run = 0, 1, KilledRun(tmp_path / "run-1", backend, "run-1")
        while num_killed < NUM_KILLS:
            event = EVENTS[num_killed // 2 % len(EVENTS)] if num_killed % 2 else None
            after_event = chance.choice((0.0, chance.uniform(0, 0.1)))
            delay = after_event if event else chance.uniform(0.3, run.seconds_left(whole_seconds))
            process = run.start()
            if await asyncio.to_thread(_wait_to_kill, run, process, delay, event):
                num_killed += 1
                run.killed()
                print(f"kill {num_killed}: {run.name}, {delay:.3f} s after {event or 'its start'}")
                continue
            _finish(process, 1)
            await run.check_finished(backend)
            num_runs += 1
            run = KilledRun(tmp_path / f"run-{num_runs}", backend, f"run-{num_runs}")
        await asyncio.to_thread(_finish, run.start(), MAX_RUN_SECONDS)
        await run.check_finished(backend)
        print(f"a whole run: {whole_seconds:.1f} s; {num_killed} kills in {num_runs} runs")
