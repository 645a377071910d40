"""Life: a backend from its start to its last step, or to its death, in a process of its own.

Real are ledger, records, gateway, step runner, publishers and the trainer's arithmetic; the engine is a
stand-in that computes with what is published to it, so the same groups give the same bytes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from insitu.backend.damage import remove_leftovers
from insitu.backend.ledger import Ledger, ledger_url
from insitu.backend.plan.engine import Publication
from insitu.backend.serving import registration
from insitu.types import GroupState, JobState
from tests.gates.test_checkpoint_fallback import digest
from tests.gates.test_device import World, ended, running
from tests.support.pretended_device import SMALL, StandinScores

NUM_STEPS = 4
"""Enough for the first checkpoint to be pruned."""
NUM_KEPT = 3
LIFE_SECONDS = 90.0
_STEP_SECONDS = 40.0
_PRUNE_SECONDS = 1.0
KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class Parts:
    """What all lives share; made once, before any process is forked."""

    model: Path
    scores: StandinScores
    publication: Publication


def in_child(work: Callable[[], None], log: Path) -> int:
    """Run `work` in a forked process; return its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            said = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            os.dup2(said, 1)
            os.dup2(said, 2)
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - whatever it is, the child must not go on in the parent's code
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + LIFE_SECONDS
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError(f"a life took more than {LIFE_SECONDS:.0f} s; see {log}")
        time.sleep(0.01)


async def live(state: Path, parts: Parts, acknowledged: Path) -> dict[str, Any]:
    """Start as `insitu serve` does, train all steps, prune; return what the books say."""
    fallen: list[str] = []
    original = registration.fall_back

    def fall_back(*args: Any) -> Any:
        behind, said = original(*args)
        fallen.append(said)
        return behind, said

    registration.fall_back = fall_back
    if state.is_dir():
        with Ledger(ledger_url(state)) as ledger:
            remove_leftovers(ledger, state / "runs")
    async with running(state, SMALL, parts.model, parts.scores, parts.publication) as world:
        world.ledger.requeue_running()
        work = asyncio.create_task(
            world.supervisor._work(world.registrar, world.runner, world.leases, world.ledger)
        )
        calls = asyncio.create_task(answered(world, acknowledged))
        for step in range(NUM_STEPS):
            job = world.queue("run", step)
            await until(lambda job=job: world.ledger.get_job(job.id).state is JobState.SUCCEEDED, work)
        await until(lambda: world.traffic.latest.get("run") == NUM_STEPS, work)
        await pruned(world)
        await ended(calls)
        await until(lambda: not unstored(world, acknowledged, f"ro-{os.getpid()}-"), work)
        await ended(work)
        return books(world, acknowledged) | {"fell_back": fallen}


async def until(done: Callable[[], bool], work: asyncio.Task[None]) -> None:
    deadline = time.monotonic() + _STEP_SECONDS
    while not done():
        assert not work.done(), work.exception()
        assert time.monotonic() < deadline, "a step does not end"
        await asyncio.sleep(0.01)


async def pruned(world: World) -> None:
    """Wait until old checkpoints are gone; one whose step was committed just before a fault may stay."""
    deadline = time.monotonic() + _PRUNE_SECONDS
    while len(world.ledger.checkpoints("run")) > NUM_KEPT and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    while world.runner._retiring:
        await asyncio.wait(world.runner._retiring, timeout=_STEP_SECONDS)


async def answered(world: World, acknowledged: Path) -> None:
    """Make calls, each in a rollout of its own, and note in another file which were answered."""
    url, headers = world.traffic.gateway_urls[0], {"authorization": "Bearer default"}
    with acknowledged.open("ab", buffering=0) as log:
        for number in range(sys.maxsize):
            rollout = f"ro-{os.getpid()}-{number}"
            body = {"model": "run", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            async with world.traffic.http.post(
                f"{url}/rollouts/{rollout}/v1/chat/completions", json=body, headers=headers
            ) as answer:
                await answer.read()
            if answer.status == 200:
                log.write(f"{rollout} {answer.headers['x-insitu-call-id']}\n".encode())
            await asyncio.sleep(0.02)


def books(world: World, acknowledged: Path) -> dict[str, Any]:
    """Return the digests of the kept steps, the ledger's figures and what of the answers is known."""
    ledger, run = world.ledger, world.ledger.get_run("run")
    kept = sorted(checkpoint.step for checkpoint in ledger.checkpoints("run"))
    records = [ledger.group_record("run", f"run-{s}-{g}") for s in range(NUM_STEPS) for g in (0, 1)]
    lost = unstored(world, acknowledged)
    folder = world.state / "runs" / "run" / "checkpoints"
    return {
        "digests": {str(step): digest(world, step) for step in kept[-NUM_KEPT:]},
        "steps": [step.step for step in ledger.steps("run")],
        "trained": [record.step for record in records if record.state is GroupState.CONSUMED],
        "state": [str(run.state), run.step, run.lost_steps],
        "left_over": sorted({path.name for path in folder.iterdir()} - {f"{step:06d}" for step in kept}),
        "answered": len(acknowledged.read_text().splitlines()),
        "unrecorded": len(lost),
        "uncounted": sum(not world.records.was_counted(rollout) for rollout in lost),
    }


def unstored(world: World, acknowledged: Path, own: str = "") -> list[str]:
    """Return the rollouts of answered calls that are not in the store, of this life if `own` begins them."""
    answers = [line.split() for line in acknowledged.read_text().splitlines() if line.count(" ") == 1]
    answers = [(rollout, call) for rollout, call in answers if rollout.startswith(own)]
    stored = world.records.exists([call for _, call in answers])
    return [rollout for rollout, call in answers if call not in stored]


def whole_life(state: Path, parts: Parts, acknowledged: Path, result: Path) -> None:
    """Live to the end and write the books."""
    figures = asyncio.run(live(state, parts, acknowledged))
    result.write_text(json.dumps(figures))
