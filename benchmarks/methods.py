"""Compare the ways to learn on single-digit addition, on a real model through `insitu serve`.

    python benchmarks/methods.py --json

Of the 81 questions, 21 are held out; success is the share of exact answers to them, four samples each. An
update has 16 groups of 8 rollouts; with a teacher, which judges every token and needs no siblings, of 2. The
parts, in turn, all on one backend:

- `grpo`: from the base model, until held-out success reaches the goal or the steps are used up;
- `sft+grpo`: two updates on 32 given answers, then `grpo` from there; rollouts until the same success;
- `dpo`: from the base model, best against worst rollout of each group;
- `distill`: from the base model with the last step of `grpo` as the teacher, in a third of its rollouts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parent.parent))

from insitu.backend.plan.compute import this_cpu
from insitu.client import InsituClient
from insitu.gateway_client import GatewayClient
from insitu.harness.gains.gain import compare
from insitu.harness.gains.measurement import Measurement, plus_minus
from insitu.testing.models import smollm2
from insitu.types import LoraSettings, StepSettings, Trajectory, TrajectoryGroup
from insitu.wire.bodies import Demonstration
from tests.support.addition import Rollouts, mean_reward, reward, train
from tests.support.backend import Backend, running_backend
from tests.support.episodes import Outcome, one_group

NUM_GROUPS, GROUP_SIZE, TAUGHT_SIZE, NUM_SAMPLES, NUM_HELD_OUT = 16, 8, 2, 4, 21
NUM_GIVEN, GIVEN_PER_UPDATE = 32, 16
RATE = 5e-4


@dataclass(frozen=True)
class Question:
    a: int
    b: int

    @property
    def text(self) -> str:
        return f"What is {self.a} + {self.b}? Reply with the number only."

    @property
    def answer(self) -> str:
        return str(self.a + self.b)

    async def episode(self, rollouts: Rollouts, rollout_id: str) -> Outcome:
        said = await rollouts.say(rollout_id, [{"role": "user", "content": self.text}])
        return [said], reward(said.text, self.answer)


@dataclass
class Bench:
    """One backend, the split of the questions, and what was measured."""

    backend: Backend
    client: InsituClient
    http: aiohttp.ClientSession
    options: argparse.Namespace
    held_out: list[Question] = field(default_factory=list)
    training: list[Question] = field(default_factory=list)

    def __post_init__(self) -> None:
        every = [Question(a, b) for a in range(1, 10) for b in range(1, 10)]
        random.Random(self.options.seed).shuffle(every)
        self.held_out, self.training = every[:NUM_HELD_OUT], every[NUM_HELD_OUT:]

    async def register(self, run: str, init_from: str | None = None) -> Rollouts:
        """Close the runs before, since merged weights serve one run, and register the next."""
        for other in await self.client.list_runs():
            await self.client.close_run(other.name)
        lora = None if init_from else LoraSettings(seed=self.options.seed)
        await self.client.register_run(run, "smollm2", lora=lora, init_from=init_from)
        await self.client.wait_run_ready(run, 600)
        return Rollouts(self.http, self.backend.gateway_url, run)

    async def success(self, rollouts: Rollouts) -> Measurement:
        """Measure the newest step of a run on the held-out questions."""
        asked = [question for question in self.held_out for _ in range(NUM_SAMPLES)]
        said = await asyncio.gather(*[each.episode(rollouts, uuid.uuid4().hex) for each in asked])
        return Measurement.of(
            (each.text, float(earned == 1.0)) for each, (_, earned) in zip(asked, said, strict=True)
        )

    async def learn(
        self, rollouts: Rollouts, settings: StepSettings, steps: int, goal: float, before: Measurement
    ) -> dict[str, Any]:
        """Train until the goal is reached on held-out questions, measured after every second step."""
        generator, began, curve = random.Random(self.options.seed), time.monotonic(), list[list[float]]()
        after, done, size = before, 0, TAUGHT_SIZE if settings.teacher else GROUP_SIZE
        while done < steps and (after.mean or 0.0) < goal:
            chosen = generator.sample(self.training, NUM_GROUPS)
            groups = list(await asyncio.gather(*[one_group(rollouts, each.episode, size) for each in chosen]))
            job = await train(self.client, groups, settings, 1200)
            done += 1
            if done % 2 == 0 or done == steps:
                after = await self.success(rollouts)
                curve.append([done, after.mean or 0.0])
            show(rollouts.run, done, mean_reward(groups), job.metrics, after)
        return {
            "steps": done,
            "rollouts": done * NUM_GROUPS * size,
            "before": shown(before),
            "after": shown(after),
            "gain": compare(before, after).to_dict(),
            "curve": curve,
            "seconds": time.monotonic() - began,
            "measurement": after,
        }

    async def imitate(self, rollouts: Rollouts) -> int:
        """Train on given answers; return the number of updates."""
        given = random.Random(self.options.seed).sample(self.training, NUM_GIVEN)
        updates = 0
        async with GatewayClient(self.backend.gateway_url, rollouts.key) as gateway:
            for start in range(0, NUM_GIVEN, GIVEN_PER_UPDATE):
                groups: list[TrajectoryGroup] = []
                for each in given[start : start + GIVEN_PER_UPDATE]:
                    messages: list[Any] = [
                        {"role": "user", "content": each.text},
                        {"role": "assistant", "content": each.answer},
                    ]
                    rollout_id = uuid.uuid4().hex
                    receipt = await gateway.demonstrate(
                        rollout_id, Demonstration(model=rollouts.run, messages=messages)
                    )
                    calls = [call.id for call in receipt.calls]
                    groups.append(
                        TrajectoryGroup(uuid.uuid4().hex, rollouts.run, [Trajectory(rollout_id, calls, 1.0)])
                    )
                job = await train(self.client, groups, StepSettings(method="sft", learning_rate=RATE))
                updates += 1
                print(f"sft update {updates}: loss {job.metrics['loss']:.3f}", file=sys.stderr, flush=True)
        return updates


def shown(measured: Measurement) -> str:
    return plus_minus(measured.mean or 0.0, measured.standard_error)


def show(run: str, step: int, earned: float, metrics: dict[str, float], after: Measurement) -> None:
    line = f"{run} step={step} reward={earned:.3f} held out {shown(after)}"
    print(f"{line} step_seconds={metrics['time/step_seconds']:.1f}", file=sys.stderr, flush=True)


async def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    serve = ["--model", str(smollm2()), "--model-name", "smollm2", "--max-seq-length", "256"]
    serve += ["--max-num-seqs", "128", "--keep-checkpoints", "4"]
    results: dict[str, dict[str, Any]] = {}

    def keep(part: str, result: dict[str, Any]) -> Measurement:
        after: Measurement = result.pop("measurement")
        results[part] = result
        print(json.dumps({part: result}), file=sys.stderr, flush=True)
        return after

    with tempfile.TemporaryDirectory(prefix="insitu-methods-") as scratch:
        async with (
            running_backend(Path(scratch) / "state", *serve) as backend,
            backend.client() as client,
            aiohttp.ClientSession() as http,
        ):
            bench = Bench(backend, client, http, options)
            plain = StepSettings(learning_rate=RATE)
            run = await bench.register("grpo")
            base = await bench.success(run)
            teacher = keep("grpo", await bench.learn(run, plain, options.steps, options.goal, base))
            num_steps = results["grpo"]["steps"]
            third = max(1, num_steps * GROUP_SIZE // (3 * TAUGHT_SIZE))

            run = await bench.register("student")
            taught = StepSettings(method="distill", teacher=f"grpo@{num_steps}", learning_rate=RATE)
            keep("distill", await bench.learn(run, taught, third, 0.9 * (teacher.mean or 0.0), base))

            run = await bench.register("sft")
            updates = await bench.imitate(run)
            warm = await bench.success(run)
            run = await bench.register("warm", init_from=f"sft@{updates}")
            result = await bench.learn(run, plain, num_steps, teacher.mean or 0.0, warm)
            keep("sft+grpo", result | {"sft_updates": updates, "base": shown(base)})

            run = await bench.register("dpo")
            pairs = StepSettings(method="dpo", learning_rate=RATE)
            keep("dpo", await bench.learn(run, pairs, options.dpo_steps, 1.0, base))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=16, help="most updates of grpo")
    parser.add_argument("--dpo-steps", type=int, default=12)
    parser.add_argument("--goal", type=float, default=0.5, help="held-out success at which grpo ends")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave no backend behind
    results = asyncio.run(measure(options))
    if options.json:
        print(json.dumps({"parts": results, "cpu": this_cpu(), "seed": options.seed}))
        return
    for part, result in results.items():
        print(f"{part:<9} {result['before']} → {result['after']}, {result['rollouts']} rollouts")


if __name__ == "__main__":
    main()
