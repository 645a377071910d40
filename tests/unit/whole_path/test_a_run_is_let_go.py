"""`insitu finetune` keeps its run active while it works, and lets it go when it ends, however it ends."""

from __future__ import annotations

import asyncio
from typing import Any

from insitu.errors import Unavailable
from insitu.harness import backend_adapter
from insitu.types import RunState
from tests.support.finetune_bench import FinetuneBench, agent, by_generation, one_call, open_bench, rewards


async def slow(value: Any, context: Any) -> str:
    """Answer with one call, and be silent for a while."""
    said = await one_call(value, context)
    await asyncio.sleep(0.5)
    return said


def configure(bench: FinetuneBench) -> None:
    bench.project.configure(
        workflow=agent(slow),
        eval=rewards(by_generation),
        trajectory_builders={"groups": {"num_generations": 2}},
        finetuning={"num_epochs": 1},
    )


def is_done(bench: FinetuneBench) -> bool:
    run = bench.backend.ledger.get_run("small")
    return run.done_at > run.seen_at > 0


async def test_a_run_that_ends_is_let_go(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch) as bench:
        configure(bench)
        assert (await bench.run()).outcome == "succeeded"
        assert is_done(bench)


async def test_a_run_that_fails_is_let_go(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch) as bench:
        configure(bench)
        bench.backend.fail_next_job = "out of memory"
        assert (await bench.run()).outcome == "failed"
        assert is_done(bench)


async def test_a_run_that_is_interrupted_is_let_go(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch) as bench:
        configure(bench)
        running = asyncio.create_task(bench.run())
        async with asyncio.timeout(20):
            while not list(bench.project.output.glob("trajectories/*")):
                await asyncio.sleep(0.01)
        running.cancel()
        assert (await running).outcome == "interrupted"
        assert is_done(bench)


async def test_a_run_whose_agents_are_silent_is_heard(tmp_path, monkeypatch):
    monkeypatch.setattr(backend_adapter, "_ALIVE_SECONDS", 0.05)
    async with open_bench(tmp_path, monkeypatch) as bench:
        configure(bench)
        running = asyncio.create_task(bench.run())
        seen = set[float]()
        while not running.done():
            if "small" in {run.name for run in bench.backend.ledger.list_runs()}:
                seen.add(bench.backend.ledger.get_run("small").seen_at)
            await asyncio.sleep(0.02)
        assert (await running).outcome == "succeeded"
        assert len(seen) > 5, seen


async def test_a_place_that_is_taken_is_said_before_anything_runs(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch) as bench:
        configure(bench)
        ledger = bench.backend.ledger

        async def taken(run: Any) -> None:
            ledger.transition_run(run.name, RunState.LOADING)
            ledger.transition_run(run.name, RunState.IDLE, "one run at a time, now other, which is active")

        monkeypatch.setattr(bench.backend, "_admit", taken)
        summary = await bench.run()
        assert summary.outcome == "failed"
        assert "run 'small' is idle: one run at a time, now other, which is active" in summary.reason
        assert not list(bench.project.output.glob("trajectories/*"))


async def test_a_backend_that_does_not_hear_the_end_changes_nothing(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch) as bench:
        configure(bench)

        async def gone(*_: object) -> None:
            raise Unavailable("no backend")

        monkeypatch.setattr(backend_adapter.InsituClient, "release_run", gone)
        assert (await bench.run()).outcome == "succeeded"
