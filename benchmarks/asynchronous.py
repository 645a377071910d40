"""Measure how much of a run `schedule: asynchronous` overlaps: wall time against the longer side.

    python benchmarks/asynchronous.py --json [--steps 16] [--bound 1]

The real command, gateway, API and ledger; stand-ins for the engine, whose answers take a fixed time, and for
the trainer, which waits a fixed time and keeps the engine serving. As many rollouts run at once as a step
needs, so the engine's side takes `engine seconds` a step. Wall time: from the start of the first rollout to
the end of the last step. One fill of the pipeline is part of it: (steps × longer + shorter) is the least.

`trainer_busy_seconds`: from the start of each job to its commit, more than its fixed time on a busy machine.
`trainer_waits_seconds_p50`: from the end of a step to the submission of the next.
overlap = (engine side + trainer side − wall time) / shorter side: 0 for one after the other, 1 if the shorter
side is hidden.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.finetuning import Project  # noqa: E402
from tests.support.standin_backend import StandinBackend  # noqa: E402
from tests.support.standin_engine import Behaviour  # noqa: E402

SIDES = ((2.0, 1.0), (1.0, 2.0))
"""Seconds of the engine and of the trainer for a step."""
GROUPS_PER_STEP = 4
NUM_GENERATIONS = 2
NUM_SYNCHRONOUS_STEPS = 3
LIMIT = 1.1
RUN_SECONDS = 300.0


async def measure(engine: float, trainer: float, schedule: str, num_steps: int, bound: int) -> dict[str, Any]:
    """Run one pass of `num_steps` steps."""
    with tempfile.TemporaryDirectory(prefix="insitu-async-") as scratch:
        path = Path(scratch)
        behaviour = Behaviour(delay_seconds=(engine, engine))
        backend = StandinBackend(path / "state", behaviour, train_seconds=trainer, hold_calls=False)
        async with backend:
            project = Project(
                path / "project", backend.port, backend.gateway_url, num_steps * GROUPS_PER_STEP
            )
            project.configure(
                eval={"general": {"max_concurrency": GROUPS_PER_STEP * NUM_GENERATIONS}},
                trajectory_builders={"groups": {"num_generations": NUM_GENERATIONS}},
                trainer_adapters={"backend": {"training": {"max_staleness": bound}}},
                finetuning={"num_epochs": 1, "groups_per_step": GROUPS_PER_STEP, "schedule": schedule},
            )
            ran = await asyncio.to_thread(
                subprocess.run,
                project.command(),
                cwd=project.path,
                capture_output=True,
                text=True,
                timeout=RUN_SECONDS,
                check=False,
            )
            if ran.returncode:
                raise SystemExit(f"insitu finetune failed:\n{ran.stdout}{ran.stderr}")
            jobs = [backend.ledger.get_job(step.job_id) for step in backend.ledger.steps("small")]
        busy = sum((job.finished_at or 0.0) - (job.started_at or 0.0) for job in jobs)
        return figures(project, engine, trainer, schedule) | {"trainer_busy_seconds": round(busy, 3)}


def figures(project: Project, engine: float, trainer: float, schedule: str) -> dict[str, Any]:
    """Read a finished run."""
    stores = sorted((project.output / "trajectories").glob("epoch-*.jsonl"))
    rollouts = [json.loads(line) for store in stores for line in store.read_text().splitlines()]
    journal = project.lines("journal.jsonl")
    submits = [event["at"] for event in journal if event["event"] == "submitted"]
    ends = [event["at"] for event in journal if event["event"] == "step"]
    gaps = [submit - end for end, submit in zip(ends, submits[1:], strict=False)]
    lines = [line for line in project.lines("steps.jsonl") if line["step"]]
    wall = max(ends) - min(rollout["started_at"] for rollout in rollouts)
    sides = engine * len(lines), trainer * len(lines)
    return {
        "schedule": schedule,
        "engine_seconds": engine,
        "trainer_seconds": trainer,
        "num_steps": len(lines),
        "wall_seconds": round(wall, 3),
        "longer_side_seconds": max(sides),
        "wall_to_longer_side": round(wall / max(sides), 4),
        "trainer_waits_seconds_p50": round(statistics.median(gaps), 3),
        "overlap": round((sum(sides) - wall) / min(sides), 4),
        "max_staleness": max(line["training"]["staleness/max"] for line in lines),
        "num_stale_groups": sum(
            line.get("stale", {}).get("by_age", 0) + line.get("stale", {}).get("by_kl", 0) for line in lines
        ),
        "rollouts_trained": sum(line["account"]["trained"] for line in lines),
        "num_rollouts": len(rollouts),
    }


async def run_all(num_steps: int, bound: int) -> dict[str, Any]:
    """Measure both schedules with either side the longer one."""
    rows: list[dict[str, Any]] = []
    for engine, trainer in SIDES:
        for schedule in ("synchronous", "asynchronous"):
            steps = num_steps if schedule == "asynchronous" else min(num_steps, NUM_SYNCHRONOUS_STEPS)
            rows.append(await measure(engine, trainer, schedule, steps, bound))
            print(rows[-1], file=sys.stderr)
    ahead = [row for row in rows if row["schedule"] == "asynchronous"]
    passed = all(row["wall_to_longer_side"] <= LIMIT and row["max_staleness"] <= bound for row in ahead)
    return {"bound": bound, "limit": LIMIT, "passed": passed, "runs": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=16, help="steps of an asynchronous run")
    parser.add_argument("--bound", type=int, default=1, help="training.max_staleness")
    options = parser.parse_args()
    result = asyncio.run(run_all(options.steps, options.bound))
    print(json.dumps(result) if options.json else json.dumps(result, indent=2))
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
