"""Measure how much of a run `schedule: asynchronous` overlaps: wall time against the longer side.

    python benchmarks/asynchronous.py --json [--part standin real goal] [--steps 16] [--bound 1] [--seed 0 1]

standin   The real command, gateway, API and ledger; stand-ins for the engine, whose answers take a fixed
          time, and for the trainer, which waits a fixed time and keeps the engine serving. As many rollouts
          run at once as a step needs, so the engine's side takes `engine seconds` a step.
real      Everything is real: SmolLM2-135M learns to add, vLLM on one core, the trainer on the other. The
          sides are those of the synchronous run: until a step is submitted, and from there to its end.

goal      Everything is real, and the runs of each seed differ in the bound alone, 0 and 1: how many rollouts
          until the mean reward of three steps reaches 0.6, where the run is stopped. It is kept in
          `results/asynchronous.jsonl` and not repeated; seeds may be measured one by one.

Wall time: from the start of the first rollout to the end of the last step. One fill of the pipeline is part
of it: (steps × longer + shorter) is the least.

`trainer_busy_seconds`: from the start of each job to its commit, more than its fixed time on a busy machine.
`trainer_waits_seconds_p50`: from the end of a step to the submission of the next.
overlap = (engine side + trainer side − wall time) / shorter side: 0 for one after the other, 1 if the shorter
side is hidden.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.evidence_pairs import ratio_of  # noqa: E402
from insitu.backend.plan.compute import this_cpu  # noqa: E402
from insitu.demo.commands import MODEL_NAME  # noqa: E402
from insitu.demo.demo import write_project  # noqa: E402
from insitu.testing.models import smollm2  # noqa: E402
from tests.support.backend import running_backend  # noqa: E402
from tests.support.demo_runs import configure, finetune  # noqa: E402
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
REAL_STEPS, REAL_GROUPS = 8, 8
SCHEDULES = ("synchronous", "asynchronous")
GOAL, GOAL_STEPS, GOAL_MEAN_OF = 0.6, 32, 3
GOAL_BOUNDS = (0, 1)
GOAL_LIMIT = 1.15
LOOK_SECONDS = 1.0
RESULTS = ROOT / "benchmarks" / "results" / "asynchronous.jsonl"


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
    ran = read(project.output)
    sides = engine * ran["num_steps"], trainer * ran["num_steps"]
    wall = ran["wall_seconds"]
    return {
        "schedule": schedule,
        "engine_seconds": engine,
        "trainer_seconds": trainer,
        **ran,
        "longer_side_seconds": max(sides),
        "wall_to_longer_side": round(wall / max(sides), 4),
        "overlap": round((sum(sides) - wall) / min(sides), 4),
    }


def read(output: Path) -> dict[str, Any]:
    """Return what a run directory says of its steps."""
    stores = sorted((output / "trajectories").glob("epoch-*.jsonl"))
    rollouts = [row for store in stores for row in rows_of(store)]
    journal, steps = rows_of(output / "journal.jsonl"), rows_of(output / "steps.jsonl")
    began = min(rollout["started_at"] for rollout in rollouts)
    submits = [event["at"] for event in journal if event["event"] == "submitted"]
    ends = [event["at"] for event in journal if event["event"] == "step"]
    gaps = [submit - end for end, submit in zip([began, *ends], submits, strict=False)]
    lines = [line for line in steps if line["step"]]
    stale = [line.get("stale", {}) for line in lines]
    return {
        "num_steps": len(lines),
        "wall_seconds": round(max(ends) - began, 3),
        "until_submitted_seconds": round(sum(gaps), 3),
        "submitted_to_end_seconds": round(
            sum(end - submit for submit, end in zip(submits, ends, strict=False)), 3
        ),
        "trainer_waits_seconds_p50": round(statistics.median(gaps[1:]), 3),
        "max_staleness": max(line["training"]["staleness/max"] for line in lines),
        "num_stale_groups": sum(each.get("by_age", 0) + each.get("by_kl", 0) for each in stale),
        "rollouts_trained": sum(line["account"]["trained"] for line in lines),
        "num_rollouts": len(rollouts),
    }


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file that may still grow."""
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


async def measure_real(num_steps: int, bound: int) -> list[dict[str, Any]]:
    """Train the demo's model with both schedules, one after the other, on one backend."""
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="a-") as scratch:  # short: Ray's sockets lie in it
        project = Path(scratch) / "project"
        write_project(project)
        arguments = ["--model", str(smollm2()), "--model-name", MODEL_NAME, "--max-seq-length", "512"]
        arguments += ["--publication", "adapter", "--placement", "dedicated"]
        async with running_backend(Path(scratch) / "state", *arguments) as backend:
            for schedule in SCHEDULES:
                finetuning = {"num_epochs": -(-num_steps * REAL_GROUPS // 16), "groups_per_step": REAL_GROUPS}
                changes = {
                    "finetuning": finetuning | {"schedule": schedule},
                    "training": {"max_staleness": bound},
                }
                config = configure(project, backend, schedule, changes)
                config.write_text("\n".join(_without_validation(config)))
                await finetune(config)
                runs.append({"schedule": schedule, **read(project / "runs" / schedule)})
                print(runs[-1], file=sys.stderr)
    longer = max(runs[0]["until_submitted_seconds"], runs[0]["submitted_to_end_seconds"])
    for row in runs:
        row["longer_side_seconds"] = longer
        row["wall_to_longer_side"] = round(row["wall_seconds"] / longer, 4)
    runs[1]["wall_to_synchronous"] = round(runs[1]["wall_seconds"] / runs[0]["wall_seconds"], 4)
    return runs


def _without_validation(config: Path) -> list[str]:
    """Drop the validation of the demo: only steps are timed."""
    return [line for line in config.read_text().splitlines() if not line.startswith("validation:")]


async def learn(seed: int, bound: int) -> dict[str, Any]:
    """Train from the base model, with a backend of its own."""
    with tempfile.TemporaryDirectory(prefix="a-") as scratch:
        project = Path(scratch) / "project"
        write_project(project)
        arguments = ["--model", str(smollm2()), "--model-name", MODEL_NAME, "--max-seq-length", "512"]
        async with running_backend(Path(scratch) / "state", *arguments) as backend:
            finetuning = {"num_epochs": GOAL_STEPS, "schedule": "asynchronous", "seed": seed}
            training = {"max_staleness": bound, "learning_rate": 5e-4}
            changes = {"model": {"seed": seed}, "finetuning": finetuning, "training": training}
            config = configure(project, backend, "goal", changes)
            config.write_text("\n".join(_without_validation(config)))
            output = project / "runs" / "goal"
            training_task = asyncio.create_task(finetune(config))
            while not training_task.done() and rollouts_to_goal(curve(output)) is None:
                await asyncio.wait([training_task], timeout=LOOK_SECONDS)
            if training_task.done():
                training_task.result()
            training_task.cancel()
            await asyncio.wait([training_task])
        return {"cpu": this_cpu(), "seed": seed, "bound": bound, **curve(output), **read(output)}


def curve(output: Path) -> dict[str, Any]:
    """Return the mean reward of each step so far, and its rollouts."""
    path = output / "steps.jsonl"
    steps = [line for line in rows_of(path) if line["step"]] if path.exists() else []
    return {
        "rewards": [round(line["avg_reward"], 4) for line in steps],
        "rollouts": [line["account"]["total"] for line in steps],
    }


def rollouts_to_goal(run: Mapping[str, Any]) -> int | None:
    """Count the rollouts until the mean of three steps first reached the goal."""
    rewards: list[float] = run["rewards"]
    for end in range(GOAL_MEAN_OF, len(rewards) + 1):
        if statistics.fmean(rewards[end - GOAL_MEAN_OF : end]) >= GOAL:
            return sum(run["rollouts"][:end])
    return None


async def measure_goal(seeds: Sequence[int]) -> dict[str, Any]:
    """Run what is not on file; compare the bounds seed by seed."""
    known = {(run["seed"], run["bound"]): run for run in (rows_of(RESULTS) if RESULTS.exists() else [])}
    for seed in seeds:
        for bound in GOAL_BOUNDS:
            if (seed, bound) not in known:
                known[seed, bound] = await learn(seed, bound)
                with RESULTS.open("a") as results:
                    results.write(json.dumps(known[seed, bound]) + "\n")
    counts = {key: rollouts_to_goal(run) for key, run in sorted(known.items())}
    pairs = [
        (counts[seed, 1], counts[seed, 0])
        for seed in sorted({seed for seed, _ in counts})
        if counts.get((seed, 0)) and counts.get((seed, 1))
    ]
    figures: dict[str, Any] = {
        "goal": GOAL,
        "rollouts_to_goal": {f"seed {seed}, bound {bound}": count for (seed, bound), count in counts.items()},
    }
    if pairs:
        ratio = ratio_of([math.log(late / early) for late, early in pairs if late and early])
        figures["ratio"] = round(ratio.mean, 3)
        figures["interval_95"] = [round(ratio.low, 3), round(ratio.high, 3)]
        figures["ratio_of_seeds"] = [round(each, 3) for each in ratio.of_seeds]
        figures["reached"] = ratio.mean <= GOAL_LIMIT
    return figures


async def run_standin(num_steps: int, bound: int) -> list[dict[str, Any]]:
    """Measure both schedules with either side the longer one."""
    rows: list[dict[str, Any]] = []
    for engine, trainer in SIDES:
        for schedule in SCHEDULES:
            steps = num_steps if schedule == "asynchronous" else min(num_steps, NUM_SYNCHRONOUS_STEPS)
            rows.append(await measure(engine, trainer, schedule, steps, bound))
            print(rows[-1], file=sys.stderr)
    return rows


async def run_all(parts: Sequence[str], num_steps: int, bound: int, seeds: Sequence[int]) -> dict[str, Any]:
    result: dict[str, Any] = {"bound": bound, "limit": LIMIT}
    if "standin" in parts:
        result["runs"] = await run_standin(num_steps, bound)
    if "real" in parts:
        result["real"] = await measure_real(min(num_steps, REAL_STEPS), bound)
    if "goal" in parts:
        result["learning"] = await measure_goal(seeds)
    rows = [*result.get("runs", []), *result.get("real", [])]
    ahead = [row for row in rows if row["schedule"] == "asynchronous"]
    result["passed"] = all(
        row["wall_to_longer_side"] <= LIMIT and row["max_staleness"] <= bound for row in ahead
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("standin", "real", "goal")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", nargs="+", choices=parts, default=parts[:2])
    parser.add_argument("--seed", nargs="+", type=int, default=(0, 1, 2, 3), help="seeds of the part `goal`")
    parser.add_argument("--steps", type=int, default=16, help="steps of an asynchronous run")
    parser.add_argument("--bound", type=int, default=1, help="training.max_staleness")
    options = parser.parse_args()
    result = asyncio.run(run_all(options.part, options.steps, options.bound, options.seed))
    print(json.dumps(result) if options.json else json.dumps(result, indent=2))
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
