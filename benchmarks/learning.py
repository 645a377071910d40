"""Measure how many steps a setting needs to learn, on a real model through `insitu serve`.

    python benchmarks/learning.py --settings '{"loss": "dapo", "learning_rate": 1e-3}' --seeds 0 1 2
    python benchmarks/learning.py --task prices --settings '{"loss": "grpo"}' '{"loss": "dapo"}' --steps 30

Every combination of settings and seed is a run of its own on the same backend: 16 examples × 8 rollouts a
step, SmolLM2-135M. `addition` is one turn, `prices` two turns with a tool. The report gives the rewards of
every step and the first step at which the mean of three steps reaches 0.5 and 0.8. Rollouts that end at the
token limit are marked as truncated, as in `insitu finetune`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parent.parent))

from insitu.backend.plan.compute import this_cpu
from insitu.client import InsituClient
from insitu.testing.models import smollm2
from insitu.types import LoraSettings, StepSettings
from tests.support.addition import Rollouts, mean_reward, train
from tests.support.backend import running_backend
from tests.support.episodes import TASKS, groups_of

NUM_GROUPS, GROUP_SIZE, MEAN_OF = 16, 8, 3


async def learn(
    client: InsituClient, rollouts: Rollouts, options: argparse.Namespace, settings: StepSettings, seed: int
) -> dict[str, Any]:
    """Train one run from the base model until its goal is reached or the steps are used up."""
    lora = LoraSettings(options.rank, 2 * options.rank, seed)
    await client.register_run(rollouts.run, "smollm2", lora=lora)
    await client.wait_run_ready(rollouts.run, 600)
    generator, began = random.Random(seed), time.monotonic()
    rewards: list[float] = []
    metrics: list[dict[str, float]] = []
    for step in range(1, options.steps + 1):
        groups = await groups_of(rollouts, options.task, generator, NUM_GROUPS, GROUP_SIZE)
        rewards.append(mean_reward(groups))
        if reached(rewards, options.goal) is not None:
            break
        job = await train(client, groups, settings, 1200)
        metrics.append(job.metrics)
        show(rollouts.run, step, rewards[-1], job.metrics)
    await client.close_run(rollouts.run)
    return {
        "settings": {name: getattr(settings, name) for name in options.shown},
        "rank": options.rank,
        "seed": seed,
        "steps_to_half": reached(rewards, 0.5),
        "steps_to_0.8": reached(rewards, 0.8),
        "seconds": time.monotonic() - began,
        "rewards": rewards,
        "mismatch": [row.get("mismatch/mean_abs") for row in metrics],
    }


def reached(rewards: list[float], goal: float) -> int | None:
    """Count the steps until the mean of three steps first reached the goal."""
    for end in range(MEAN_OF, len(rewards) + 1):
        if sum(rewards[end - MEAN_OF : end]) / MEAN_OF >= goal:
            return end - 1
    return None


def show(run: str, step: int, reward: float, metrics: dict[str, float]) -> None:
    names = ("mismatch/mean_abs", "probe/applied", "grad_norm", "entropy", "time/train_seconds")
    names = (*names, "account/trained", "account/truncated", "account/zero_variance", "clip/high_fraction")
    figures = " ".join(f"{name.rpartition('/')[2]}={metrics[name]:.3g}" for name in names if name in metrics)
    print(f"{run} step={step} reward={reward:.3f} {figures}", file=sys.stderr, flush=True)


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    serve = ["--model", str(smollm2()), "--model-name", "smollm2", "--max-seq-length", "256"]
    serve += ["--max-num-seqs", "128", "--dtype", options.dtype]
    with tempfile.TemporaryDirectory(prefix="insitu-learning-") as scratch:
        async with (
            running_backend(Path(scratch) / "state", *serve) as backend,
            backend.client() as client,
            aiohttp.ClientSession() as http,
        ):
            for number, text in enumerate(options.settings):
                settings = StepSettings(**json.loads(text))
                options.shown = list(json.loads(text))
                for seed in options.seeds:
                    run = f"{options.task}-{settings.loss.replace('_', '-')}-{number}-{seed}"
                    rollouts = Rollouts(http, backend.gateway_url, run)
                    results.append(await learn(client, rollouts, options, settings, seed))
                    print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=sorted(TASKS), default="addition")
    parser.add_argument("--settings", nargs="+", default=["{}"], help="step settings as JSON, one per run")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--goal", type=float, default=0.8, help="a run ends when it has reached this")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = [row | {"cpu": this_cpu()} for row in asyncio.run(measure(options))]
    for row in results:
        print(json.dumps(row) if options.json else {k: v for k, v in row.items() if k != "mismatch"})


if __name__ == "__main__":
    main()
