"""Simulate gateways, engines, harness and trainer on a virtual clock, after comparing it with a measured run.

    python benchmarks/simulation.py --json [--part gate nodes]

gate    Real gateways in front of stand-in engines (see gateways.py): what a call costs each process and how
        long it waits otherwise is measured with one gateway; from that the simulation must predict the calls
        per second with one and with two within 10 %.
nodes   100 nodes with 10,000 rollouts, with the costs that were measured here for gateway and client. What a
        GPU does is not measured: the figures of engines, trainer and network are assumptions (`Plan`).

Real are the choice of a gateway and of an engine (`gateway_of`, `ReplicaPool.choose`), the capacity rule and
the admission of groups (`may_start`, `admit`). Time, processors and networks are simulated.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.figures import show  # noqa: E402
from benchmarks.gateways import ANSWER_TOKENS, PROMPT_TOKENS, body_of, many, rig  # noqa: E402
from benchmarks.virtual_time import Process, Shared, VirtualLoop, machine  # noqa: E402
from insitu.backend.plan.compute import this_cpu  # noqa: E402
from insitu.gateway.engines.replicas import ReplicaPool  # noqa: E402
from insitu.gateway.shared.settings import Limits  # noqa: E402
from insitu.harness.loop.staleness import Bounds, FinishedGroup, admit, may_start  # noqa: E402
from insitu.types import gateway_of  # noqa: E402

GATE_CALLS, GATE_WIDTH, GATE_SECONDS, GATE_ROUNDS = 1500, 64, 0.2, 3
ALONE_CALLS = 30
WITHIN = 0.1
BEFORE_SHARE = 0.5
"""Of the gateway's time for a call, what is spent before the engine has it."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of CPU of one call in each process, and how long it waits besides."""

    client: float
    gateway: float
    engine: float
    waiting: float = 0.0
    """For the disk of the records."""
    blocked: float = 0.0
    """For each second of CPU in a saturated gateway, how long its loop stands still besides."""


# ── the gate ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Measured:
    """Calls with real gateways."""

    calls_per_second: float
    costs: Costs


async def measured(count: int, seconds: float = GATE_SECONDS) -> Measured:
    """Measure the calls per second of real gateways, and what a call costs; engines take `seconds` for it."""
    body = body_of(PROMPT_TOKENS)
    async with rig(count, "--tokens", str(ANSWER_TOKENS), "--seconds", str(seconds)) as made:
        await many(made, [f"first-{index}" for index in range(GATE_CALLS)], body, GATE_WIDTH)
        gateways, engines, client = made.cpu(), made.engine_cpu(), time.process_time()
        began = time.monotonic()
        await many(made, [f"r-{index}" for index in range(GATE_CALLS)], body, GATE_WIDTH)
        speed = GATE_CALLS / (time.monotonic() - began)
        client, gateways, engines = (
            spent / GATE_CALLS
            for spent in (time.process_time() - client, made.cpu() - gateways, made.engine_cpu() - engines)
        )
        began = time.monotonic()
        await many(made, [f"alone-{index}" for index in range(ALONE_CALLS)], body, 1)
        alone = (time.monotonic() - began) / ALONE_CALLS
    waiting = alone - seconds - client - gateways - engines
    return Measured(speed, Costs(client, gateways, engines, max(0.0, waiting)))


async def calibrated() -> Measured:
    """Measure one gateway, also without any time in the engines, when the gateway is what limits."""
    saturated = await measured(1, 0.0)
    found = await measured(1)
    blocked = 1 / (saturated.calls_per_second * saturated.costs.gateway) - 1
    return Measured(found.calls_per_second, replace(found.costs, blocked=max(0.0, blocked)))


async def predicted(count: int, costs: Costs, cores: int) -> float:
    """Simulate the same calls on a machine with so many cores; return the calls per second."""
    shared = machine(cores)
    client, room = Process(shared), asyncio.Semaphore(GATE_WIDTH)
    gateways = [Process(shared, costs.blocked) for _ in range(count)]
    engines = [Process(shared) for _ in range(2)]
    urls = [f"http://gateway-{number}" for number in range(count)]
    drawn = random.Random(0)

    async def call(index: int) -> None:
        async with room:
            gateway = gateways[urls.index(gateway_of(urls, f"r-{index}"))]
            engine = drawn.choice(engines)
            await client.compute(costs.client / 2)
            await gateway.compute(costs.gateway * BEFORE_SHARE)
            await engine.compute(costs.engine / 2)
            await asyncio.sleep(GATE_SECONDS + costs.waiting)
            await engine.compute(costs.engine / 2)
            await gateway.compute(costs.gateway * (1 - BEFORE_SHARE))
            await client.compute(costs.client / 2)

    await asyncio.gather(*map(call, range(GATE_CALLS)))
    return GATE_CALLS / asyncio.get_running_loop().time()


def gate_part(cores: int) -> dict[str, Any]:
    """Calibrate and predict in each round, as the machine's speed drifts; the median error decides."""
    figures: dict[str, Any] = {}
    rounds = list[dict[int, Measured]]()
    for _ in range(GATE_ROUNDS):
        rounds.append({1: asyncio.run(calibrated()), 2: asyncio.run(measured(2))})
    for count in (1, 2):
        real = [each[count].calls_per_second for each in rounds]
        simulated = [virtually(predicted(count, each[1].costs, cores)) for each in rounds]
        errors = [guess / speed - 1 for guess, speed in zip(simulated, real, strict=True)]
        figures[f"gate_{count}"] = {
            "measured_calls_per_second": [round(speed, 1) for speed in real],
            "predicted_calls_per_second": [round(speed, 1) for speed in simulated],
            "errors": [round(error, 3) for error in errors],
            "error": round(statistics.median(errors), 3),
        }
    figures["costs"] = {
        name: [round(getattr(each[1].costs, name), 6) for each in rounds] for name in Costs.__slots__
    }
    figures["gate_passed"] = all(abs(figures[f"gate_{count}"]["error"]) <= WITHIN for count in (1, 2))
    return figures


def virtually(work: Coroutine[Any, Any, Any]) -> Any:
    """Run to its end in virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


# ── many nodes ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Plan:
    """A cluster, what runs on it, and assumptions about its GPUs."""

    nodes: int = 100
    engines_per_node: int = 8
    cores_per_node: int = 32
    rollouts: int = 10_000
    """In flight at once."""
    generations: int = 8
    groups_per_step: int = 640
    steps: int = 6
    bound: int = 1
    turns: int = 4
    output_tokens: int = 400
    """Of a turn, on average; drawn from an exponential distribution."""
    token_seconds: float = 0.010
    """Assumed: an engine's time for one token of each sequence, when it has one sequence."""
    token_seconds_per_sequence: float = 0.00015
    """Assumed: what every further sequence adds."""
    train_tokens_per_second: float = 60_000.0
    """Assumed, for all ranks together."""
    adapter_bytes: float = 160e6
    link_bytes_per_second: float = 1.25e9
    """Assumed: 10 Gbit/s out of the trainer's node."""
    load_seconds: float = 1.0
    """Assumed: for an engine to load an adapter that is there."""
    harnesses: int = 1
    """Processes of `insitu finetune`, or rather of agents, that the rollouts are spread over."""


@dataclass(slots=True)
class Node:
    """A machine with its gateway and engines."""

    gateway: Process
    pool: ReplicaPool
    engines: dict[str, Shared]


@dataclass(slots=True)
class Run:
    """One asynchronous run on the cluster, with the real rules."""

    plan: Plan
    costs: Costs
    nodes: dict[str, Node]
    harnesses: list[Process]
    drawn: random.Random = field(default_factory=lambda: random.Random(0))
    version: int = 0
    training: bool = False
    running: int = 0
    waiting: dict[int, FinishedGroup] = field(default_factory=dict[int, FinishedGroup])
    tokens: dict[int, int] = field(default_factory=dict[int, int])
    started: int = 0
    finished_rollouts: int = 0
    ages: Counter[int] = field(default_factory=Counter[int])
    stale: int = 0
    publications: list[float] = field(default_factory=list[float])
    train_seconds: float = 0.0
    waited_seconds: float = 0.0
    calls: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def may_start(self) -> bool:
        plan = self.plan
        if (self.running + 1) * plan.generations > plan.rollouts:
            return False
        under_way = self.running + len(self.waiting)
        left = plan.steps - self.version
        return may_start(
            [under_way], plan.groups_per_step, plan.bound, training=self.training, steps_left=left
        )

    def fill(self, tasks: asyncio.TaskGroup) -> None:
        while self.may_start():
            number, self.started = self.started, self.started + 1
            self.running += 1
            tasks.create_task(self.group(number))

    async def group(self, number: int) -> None:
        ids = [f"run.{number}.{generation}" for generation in range(self.plan.generations)]
        harness = self.harnesses[number % len(self.harnesses)]
        ended = await asyncio.gather(*[self.rollout(rollout, harness) for rollout in ids])
        self.running -= 1
        self.tokens[number] = sum(tokens for tokens, _ in ended)
        self.waiting[number] = FinishedGroup(number, min(oldest for _, oldest in ended), informative=True)
        self.changed.set()

    async def rollout(self, rollout_id: str, harness: Process) -> tuple[int, int]:
        """Run all turns; return the tokens, and the version that answered the first."""
        plan, costs, oldest, total = self.plan, self.costs, self.version, 0
        urls = list(self.nodes)
        node = self.nodes[gateway_of(urls, rollout_id)]
        for turn in range(plan.turns):
            tokens = max(1, round(self.drawn.expovariate(1 / plan.output_tokens)))
            await harness.compute(costs.client / 2)
            await node.gateway.compute(costs.gateway * BEFORE_SHARE)
            replica = node.pool.choose(rollout_id)
            assert replica is not None
            oldest = self.version if turn == 0 else oldest
            with replica.leased():
                await node.engines[replica.id].use(tokens)
            await node.gateway.compute(costs.gateway * (1 - BEFORE_SHARE))
            await harness.compute(costs.client / 2)
            self.calls += 1
            total += tokens
        self.finished_rollouts += 1
        return total, oldest

    async def train(self, tasks: asyncio.TaskGroup) -> None:
        plan, link = self.plan, Shared(lambda users: 1.0 / users)
        while self.version < plan.steps:
            began = asyncio.get_running_loop().time()
            while True:
                self.fill(tasks)
                bounds = Bounds(plan.bound, plan.bound)
                found = admit(
                    list(self.waiting.values()), self.version, bounds, plan.groups_per_step, more=True
                )
                if found is not None:
                    break
                self.changed.clear()
                await self.changed.wait()
            self.waited_seconds += asyncio.get_running_loop().time() - began
            for number in found.trained:
                self.ages[self.version - (self.waiting[number].oldest or 0)] += 1
            self.stale += len(found.stale)
            tokens = sum(self.tokens[number] for number in found.trained)
            self.waiting = {n: each for n, each in self.waiting.items() if n not in found.used}
            self.training = True
            self.fill(tasks)
            seconds = tokens / plan.train_tokens_per_second
            self.train_seconds += seconds
            await asyncio.sleep(seconds)
            await self.publish(link)
            self.version += 1
            self.training = False

    async def publish(self, link: Shared) -> None:
        """Send the adapter to all nodes at once over one link; each engine loads it."""
        began, plan = asyncio.get_running_loop().time(), self.plan

        async def to_node() -> None:
            await link.use(plan.adapter_bytes / plan.link_bytes_per_second)
            await asyncio.sleep(plan.load_seconds)

        await asyncio.gather(*[to_node() for _ in range(plan.nodes)])
        self.publications.append(asyncio.get_running_loop().time() - began)


def make_run(plan: Plan, costs: Costs) -> Run:
    nodes: dict[str, Node] = {}

    def speed(users: int) -> float:
        return 1.0 / (plan.token_seconds + plan.token_seconds_per_sequence * users)

    for number in range(plan.nodes):
        pool = ReplicaPool(Limits(), lambda: None, "")
        names = [f"replica-{number}-{place}" for place in range(plan.engines_per_node)]
        pool.sync({name: f"http://{name}" for name in names})
        engines = {name: Shared(speed) for name in names}
        nodes[f"http://node-{number}:8000"] = Node(Process(machine(plan.cores_per_node)), pool, engines)
    return Run(plan, costs, nodes, [Process(machine(plan.cores_per_node)) for _ in range(plan.harnesses)])


async def simulate(make: Callable[[], Run]) -> dict[str, Any]:
    run = make()
    async with asyncio.TaskGroup() as tasks:
        training = tasks.create_task(run.train(tasks))
        await training
        seconds = asyncio.get_running_loop().time()
        figures = figures_of(run, seconds)
    for node in run.nodes.values():
        await node.pool.close()
    return figures


def figures_of(run: Run, seconds: float) -> dict[str, Any]:
    engines = [engine for node in run.nodes.values() for engine in node.engines.values()]
    shares = {
        "harness": max(harness.seconds for harness in run.harnesses) / seconds,
        "busiest gateway": max(node.gateway.seconds for node in run.nodes.values()) / seconds,
        "engines": statistics.mean(engine.busy for engine in engines) / seconds,
        "trainer": (run.train_seconds + sum(run.publications)) / seconds,
    }
    return {
        "simulated_seconds": round(seconds, 1),
        "rollouts_per_minute": round(run.finished_rollouts / seconds * 60),
        "calls_per_second": round(run.calls / seconds, 1),
        "step_seconds": round(seconds / run.version, 1),
        "trainer_waited_share": round(run.waited_seconds / seconds, 3),
        "publication_seconds": round(statistics.median(run.publications), 1),
        "groups_by_age": {str(age): count for age, count in sorted(run.ages.items())},
        "stale_groups": run.stale,
        "most_calls_on_an_engine": max(engine.most for engine in engines),
        "mean_of_the_most": round(statistics.mean(engine.most for engine in engines), 1),
        "share_of_time": {name: round(share, 3) for name, share in shares.items()},
        "limit": max(shares, key=lambda name: shares[name]),
    }


def nodes_part(costs: Costs, plans: dict[str, Plan]) -> dict[str, Any]:
    return {
        name: {"plan": asdict(plan), **virtually(simulate(lambda plan=plan: make_run(plan, costs)))}
        for name, plan in plans.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("gate", "nodes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--part", nargs="+", choices=parts, default=parts)
    given = parser.parse_args()
    figures: dict[str, Any] = {
        "cpu": this_cpu(),
        "load_average_before": [round(value, 1) for value in os.getloadavg()],
    }
    passed = True
    if "gate" in given.part:
        figures |= gate_part(os.cpu_count() or 1)
        passed = figures["gate_passed"]
    if "nodes" in given.part and passed:
        costs = Costs(**{name: statistics.median(each) for name, each in figures["costs"].items()})
        figures["nodes"] = nodes_part(costs, {"one harness": Plan(), "eight harnesses": Plan(harnesses=8)})
    show(figures, as_json=given.json)
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
