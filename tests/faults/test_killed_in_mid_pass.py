"""kill -9 of `insitu finetune` in the middle of a pass over 1,000 examples: the same command goes on there.

An uninterrupted run of the same configuration says what the order has to be. Every sixth example has equal
rewards, so that steps are refilled too.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.finetuning import Project
from tests.support.standin_backend import StandinBackend
from tests.support.standin_engine import Behaviour

NUM_EXAMPLES = 1000
NUM_GENERATIONS = 2
GROUPS_PER_STEP = 8
MAX_REFILL = 2
MAX_STEPS = 8
MAX_CONCURRENCY = 8
MAX_RUN_SECONDS = 50.0
SETTINGS = {"groups_per_step": GROUPS_PER_STEP, "max_refill": MAX_REFILL, "max_steps": MAX_STEPS, "seed": 7}
REWARD = '''

def by_position(item):
    """Depends on the rollout's place alone, not on its random id."""
    _, _, index, generation, _ = item.rollout_id.split(".")
    return 0.5 if int(index) % 6 == 0 else int(generation)
'''
KILLS = [("submitted", 0.0), (None, 0.0), ("step", 0.0), (None, 0.1), ("step", 0.05)]
"""The next event of that kind, or the next stored rollout, and the seconds after it."""


class Run:
    """One run in a directory of its own."""

    def __init__(self, path: Path, backend: StandinBackend, name: str) -> None:
        self.backend, self.name = backend, name
        self.project = Project(path / name, backend.port, backend.gateway_url, NUM_EXAMPLES)
        agent = self.project.path / "small_agent.py"
        agent.write_text(agent.read_text() + REWARD)
        self.project.configure(
            eval={
                "general": {"max_concurrency": MAX_CONCURRENCY},
                "evaluators": {"reward": {"entry": "small_agent:by_position"}},
            },
            trajectory_builders={"groups": {"num_generations": NUM_GENERATIONS}},
            trainer_adapters={"backend": {"backend": {"name": name}}},
            finetuning={"num_epochs": 1, **SETTINGS},
        )

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.project.command(),
            cwd=self.project.path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def finish(self) -> str:
        process = self.start()
        try:
            said, _ = process.communicate(timeout=MAX_RUN_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
        assert process.returncode == 0, said
        return said

    def count(self, event: str | None) -> int:
        """How many events of a kind there are, or rollouts."""
        if event is None:
            return sum(
                file.read_bytes().count(b"\n") for file in self.project.output.glob("trajectories/*.jsonl")
            )
        journal = self.project.output / "journal.jsonl"
        return journal.read_bytes().count(b'{"event":"%s"' % event.encode()) if journal.exists() else 0

    def kill_after(self, event: str | None, delay: float) -> None:
        process, known = self.start(), self.count(event)
        deadline = time.monotonic() + MAX_RUN_SECONDS
        try:
            while self.count(event) <= known:
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < deadline
                time.sleep(0.002)
            time.sleep(delay)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=10)

    def stored(self) -> list[dict[str, Any]]:
        files = sorted(self.project.output.glob("trajectories/*.jsonl"))
        lines = [line for file in files for line in file.read_text().splitlines(keepends=True)]
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def trained(self) -> list[list[str]]:
        """The place of every rollout of every committed step, in the order of the jobs."""
        ledger = self.backend.ledger
        jobs = [ledger.get_job(step.job_id) for step in ledger.steps(self.name)]
        return [
            [place(t.rollout_id) for group in ledger.groups_of_job(job.id) for t in group.trajectories]
            for job in jobs
        ]

    def lines(self) -> list[tuple[Any, ...]]:
        return [
            (line["step"], line["num_examples"], line["account"]["refilled"], line["account"]["trained"])
            for line in self.project.lines("steps.jsonl")
        ]


def place(rollout_id: str) -> str:
    """Epoch, example and generation."""
    return ".".join(rollout_id.split(".")[1:-1])


@pytest.mark.timeout(120)
async def test_a_run_killed_in_mid_pass_goes_on_in_the_same_order(tmp_path: Path) -> None:
    behaviour = Behaviour(delay_seconds=(0.005, 0.02))
    async with StandinBackend(tmp_path / "state", behaviour, train_seconds=0.1) as backend:
        whole, killed = Run(tmp_path, backend, "whole"), Run(tmp_path, backend, "killed")
        said = await asyncio.to_thread(whole.finish)
        kept: dict[str, str] = {}
        for event, delay in KILLS:
            await asyncio.to_thread(killed.kill_after, event, delay)
            for rollout in killed.stored():
                found = kept.setdefault(place(rollout["rollout_id"]), rollout["rollout_id"])
                assert found == rollout["rollout_id"], "a rollout that was on the disk was run again"
        done = killed.count("step")
        assert 0 < done < MAX_STEPS
        await asyncio.to_thread(killed.finish)

        # The first update comes after `groups_per_step` groups, not after a thousand.
        first = whole.project.lines("steps.jsonl")[0]
        assert first["num_groups"] <= GROUPS_PER_STEP + MAX_REFILL
        steps = {place(r["rollout_id"]): r["metadata"]["policy_steps"] for r in whole.stored()}
        for number, rollouts in enumerate(whole.trained()):
            assert {tuple(steps[each]) for each in rollouts} == {(number,)}
        assert f"Epoch 1/1, step {MAX_STEPS} (update {MAX_STEPS}) took" in said

        # No rollout is repeated, none is trained twice, and the order is that of the uninterrupted run.
        for run in (whole, killed):
            places = Counter(place(rollout["rollout_id"]) for rollout in run.stored())
            assert set(places.values()) == {1}
            rollouts = [each for step in run.trained() for each in step]
            assert len(set(rollouts)) == len(rollouts)
            assert set(rollouts) <= set(places)
            events = Counter(event["event"] for event in run.project.lines("journal.jsonl"))
            assert (events["submitted"], events["step"], events["epoch"]) == (MAX_STEPS, MAX_STEPS, 0)
        stored = {rollout["rollout_id"] for rollout in killed.stored()}
        assert set(kept.values()) <= stored
        assert len(whole.trained()) == MAX_STEPS
        assert killed.trained() == whole.trained()
        assert killed.lines() == whole.lines()
        assert any(refilled for _, _, refilled, _ in whole.lines())
        assert sorted(map(place, stored)) == sorted(place(r["rollout_id"]) for r in whole.stored())
