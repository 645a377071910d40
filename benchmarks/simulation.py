"""Simulate gateways, engines, harness and trainer on a virtual clock, after comparing it with a measured run.

    python benchmarks/simulation.py --json

gate    Real gateways in front of stand-in engines (see gateways.py), one and two of them: from the CPU time
        that a call costs each process the simulation must predict the calls per second within 10 %.
nodes   Only then: 100 nodes with 10,000 rollouts, with the costs that were measured here for gateway and
        client. What a GPU does is not measured: the figures of engines, trainer and network are assumptions
        (`Plan`).

Real are the choice of a gateway and of an engine (`gateway_of`, `ReplicaPool.choose`), the capacity rule and
the admission of groups (`may_start`, `admit`), and the order of runs (`FairShares`). Time, processors and
networks are simulated.
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
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.figures import show  # noqa: E402
from benchmarks.gateways import ANSWER_TOKENS, PROMPT_TOKENS, body_of, many, rig  # noqa: E402
from benchmarks.virtual_time import Process, Shared, VirtualLoop, machine  # noqa: E402
from insitu.backend.fair_share import FairShares  # noqa: E402
from insitu.backend.ledger.rows import Job  # noqa: E402
from insitu.backend.plan.compute import this_cpu  # noqa: E402
from insitu.gateway.engines.replicas import ReplicaPool  # noqa: E402
from insitu.gateway.shared.settings import Limits  # noqa: E402
from insitu.harness.loop.staleness import Admission, Bounds, FinishedGroup, admit, may_start  # noqa: E402
from insitu.types import gateway_of  # noqa: E402

GATE_CALLS, GATE_WIDTH, GATE_ROUNDS = 1500, 64, 3
GATE_SECONDS = (0.1, 0.5)
"""An engine's time for a call: evenly distributed, since generations of one length would march in step."""
ALONE_CALLS = 30
WITHIN = 0.1
WHOLE = 1.0
"""A turn that no call exceeds: with thousands of calls at once, turns within a call would cost hours."""
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


def taken() -> float:
    """Return the seconds for which the machine's cores were not idle.

    They are more than the processes' own: there are interrupts, and other machines on the same host.
    """
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait


async def measured(count: int, seconds: tuple[float, float] = GATE_SECONDS) -> Measured:
    """Measure the calls per second of real gateways, and what a call costs; engines take `seconds` for it."""
    body = body_of(PROMPT_TOKENS)
    async with rig(count, "--tokens", str(ANSWER_TOKENS), "--seconds", *map(str, seconds)) as made:
        await many(made, [f"first-{index}" for index in range(GATE_CALLS)], body, GATE_WIDTH)
        gateways, engines, client = made.cpu(), made.engine_cpu(), time.process_time()
        machine_before, began = taken(), time.monotonic()
        await many(made, [f"r-{index}" for index in range(GATE_CALLS)], body, GATE_WIDTH)
        speed = GATE_CALLS / (time.monotonic() - began)
        spent = (time.process_time() - client, made.cpu() - gateways, made.engine_cpu() - engines)
        besides = (taken() - machine_before) / sum(spent)
        client, gateways, engines = (seconds * besides / GATE_CALLS for seconds in spent)
        began = time.monotonic()
        await many(made, [f"alone-{index}" for index in range(ALONE_CALLS)], body, 1)
        alone = (time.monotonic() - began) / ALONE_CALLS
    waiting = alone - sum(seconds) / 2 - client - gateways - engines
    return Measured(speed, Costs(client, gateways, engines, max(0.0, waiting)))


async def one_round() -> dict[int, Measured]:
    """Measure one gateway without any time in the engines, when it alone limits, then one and two."""
    saturated = await measured(1, (0.0, 0.0))
    blocked = 1 / (saturated.calls_per_second * saturated.costs.gateway) - 1
    found = {count: await measured(count) for count in (1, 2)}
    return {
        count: Measured(
            each.calls_per_second,
            replace(each.costs, waiting=saturated.costs.waiting, blocked=max(0.0, blocked)),
        )
        for count, each in found.items()
    }


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
            await asyncio.sleep(drawn.uniform(*GATE_SECONDS) + costs.waiting)
            await engine.compute(costs.engine / 2)
            await gateway.compute(costs.gateway * (1 - BEFORE_SHARE))
            await client.compute(costs.client / 2)

    await asyncio.gather(*map(call, range(GATE_CALLS)))
    return GATE_CALLS / asyncio.get_running_loop().time()


def gate_part(cores: int) -> dict[str, Any]:
    """Measure and predict in each round, as the machine's speed drifts; the median error decides.

    Costs are those of the calls that are predicted: with both cores busy, the same work takes more time.
    """
    figures: dict[str, Any] = {}
    rounds = [asyncio.run(one_round()) for _ in range(GATE_ROUNDS)]
    for count in (1, 2):
        real = [each[count].calls_per_second for each in rounds]
        simulated = [virtually(predicted(count, each[count].costs, cores)) for each in rounds]
        errors = [guess / speed - 1 for guess, speed in zip(simulated, real, strict=True)]
        figures[f"gate_{count}"] = {
            "measured_calls_per_second": [round(speed, 1) for speed in real],
            "predicted_calls_per_second": [round(speed, 1) for speed in simulated],
            "errors": [round(error, 3) for error in errors],
            "error": round(statistics.median(errors), 3),
        }
        figures[f"costs_{count}"] = {
            name: [round(getattr(each[count].costs, name), 6) for each in rounds] for name in Costs.__slots__
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
    """Each with one engine over all its GPUs; gateways and trainer are on machines of their own."""
    gateways: int = 8
    cores: int = 32
    """Of the machine with the gateways, and of each machine with agents."""
    runs: int = 1
    rollouts: int = 10_000
    """In flight at once, of all runs."""
    generations: int = 8
    groups_per_step: int = 640
    """Of all runs: each has its share."""
    steps: int = 3
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
    harnesses: int = 8
    """Processes in which the agents of a run are."""


@dataclass(slots=True)
class Gateway:
    """A gateway's process, and its own view of all engines."""

    process: Process
    pool: ReplicaPool


@dataclass(frozen=True, slots=True)
class Submitted:
    """A step that waits for the trainer."""

    run: str
    tokens: int
    trained: asyncio.Future[None]


@dataclass(slots=True)
class Cluster:
    """Gateways, engines and a trainer that all runs share; the next job is chosen as the backend does."""

    plan: Plan
    gateways: dict[str, Gateway]
    engines: dict[str, Shared]
    link: Shared = field(default_factory=lambda: Shared(lambda users: 1.0 / users))
    shares: FairShares = field(default_factory=FairShares)
    queue: list[Submitted] = field(default_factory=list[Submitted])
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    train_seconds: float = 0.0
    publications: list[float] = field(default_factory=list[float])

    async def train(self, run: str, tokens: int) -> None:
        """Wait until a step has been trained and published."""
        submitted = Submitted(run, tokens, asyncio.get_running_loop().create_future())
        self.queue.append(submitted)
        self.arrived.set()
        await submitted.trained

    async def work(self) -> None:
        """Train one step after the other."""
        while True:
            oldest = {each.run: each for each in reversed(self.queue)}
            chosen = self.shares.next(cast("list[Job]", sorted(oldest.values(), key=self.queue.index)))
            if chosen is None:
                self.arrived.clear()
                await self.arrived.wait()
                continue
            job = cast("Submitted", chosen)
            self.queue.remove(job)
            self.shares.charge(job.run, job.tokens)
            seconds = job.tokens / self.plan.train_tokens_per_second
            self.train_seconds += seconds
            await asyncio.sleep(seconds)
            await self.publish()
            job.trained.set_result(None)

    async def publish(self) -> None:
        """Send the adapter to all nodes at once over one link; each engine loads it."""
        began, plan = asyncio.get_running_loop().time(), self.plan

        async def to_node() -> None:
            await self.link.use(plan.adapter_bytes / plan.link_bytes_per_second)
            await asyncio.sleep(plan.load_seconds)

        await asyncio.gather(*[to_node() for _ in range(plan.nodes)])
        self.publications.append(asyncio.get_running_loop().time() - began)


@dataclass(slots=True)
class Run:
    """One asynchronous run on the cluster, with the real rules."""

    name: str
    cluster: Cluster
    costs: Costs
    harnesses: list[Process]
    drawn: random.Random
    version: int = 0
    training: bool = False
    running: int = 0
    waiting: dict[int, FinishedGroup] = field(default_factory=dict[int, FinishedGroup])
    tokens: dict[int, int] = field(default_factory=dict[int, int])
    started: int = 0
    finished_rollouts: int = 0
    ages: Counter[int] = field(default_factory=Counter[int])
    stale: int = 0
    trained_tokens: int = 0
    waited_seconds: float = 0.0
    calls: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def groups_per_step(self) -> int:
        return self.cluster.plan.groups_per_step // self.cluster.plan.runs

    def may_start(self) -> bool:
        plan = self.cluster.plan
        if (self.running + 1) * plan.generations > plan.rollouts // plan.runs:
            return False
        under_way = self.running + len(self.waiting)
        left = plan.steps - self.version
        return may_start(
            [under_way], self.groups_per_step, plan.bound, training=self.training, steps_left=left
        )

    def fill(self, tasks: asyncio.TaskGroup) -> None:
        while self.may_start():
            number, self.started = self.started, self.started + 1
            self.running += 1
            tasks.create_task(self.group(number))

    async def group(self, number: int) -> None:
        ids = [f"{self.name}.{number}.{place}" for place in range(self.cluster.plan.generations)]
        harness = self.harnesses[number % len(self.harnesses)]
        ended = await asyncio.gather(*[self.rollout(rollout, harness) for rollout in ids])
        self.running -= 1
        self.tokens[number] = sum(tokens for tokens, _ in ended)
        self.waiting[number] = FinishedGroup(number, min(oldest for _, oldest in ended), informative=True)
        self.changed.set()

    async def rollout(self, rollout_id: str, harness: Process) -> tuple[int, int]:
        """Run all turns; return the tokens, and the version that answered the first."""
        plan, costs, oldest, total = self.cluster.plan, self.costs, self.version, 0
        gateway = self.cluster.gateways[gateway_of(list(self.cluster.gateways), rollout_id)]
        for turn in range(plan.turns):
            tokens = max(1, round(self.drawn.expovariate(1 / plan.output_tokens)))
            await harness.compute(costs.client / 2)
            await gateway.process.compute(costs.gateway * BEFORE_SHARE)
            replica = gateway.pool.choose(rollout_id)
            assert replica is not None
            oldest = self.version if turn == 0 else oldest
            with replica.leased():
                await self.cluster.engines[replica.id].use(tokens)
            await gateway.process.compute(costs.gateway * (1 - BEFORE_SHARE))
            await asyncio.sleep(costs.waiting)
            await harness.compute(costs.client / 2)
            self.calls += 1
            total += tokens
        self.finished_rollouts += 1
        return total, oldest

    async def train(self, tasks: asyncio.TaskGroup) -> None:
        plan = self.cluster.plan
        while self.version < plan.steps:
            began = asyncio.get_running_loop().time()
            while (found := self.admitted(tasks)) is None:
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
            await self.cluster.train(self.name, tokens)
            self.trained_tokens += tokens
            self.version += 1
            self.training = False

    def admitted(self, tasks: asyncio.TaskGroup) -> Admission | None:
        self.fill(tasks)
        bound = self.cluster.plan.bound
        waiting = [self.waiting[number] for number in sorted(self.waiting)]
        return admit(waiting, self.version, Bounds(bound, bound), self.groups_per_step, more=True)


def make_cluster(plan: Plan, costs: Costs) -> Cluster:
    def speed(users: int) -> float:
        return 1.0 / (plan.token_seconds + plan.token_seconds_per_sequence * users)

    names = [f"replica-{number}" for number in range(plan.nodes)]
    head, gateways = machine(plan.cores), dict[str, Gateway]()
    for number in range(plan.gateways):
        pool = ReplicaPool(Limits(), lambda: None, "")
        pool.sync({name: f"http://{name}" for name in names})
        gateways[f"http://head:{8000 + number}"] = Gateway(Process(head, costs.blocked, WHOLE), pool)
    return Cluster(plan, gateways, {name: Shared(speed) for name in names})


async def simulate(plan: Plan, costs: Costs) -> dict[str, Any]:
    cluster = make_cluster(plan, costs)
    runs = list[Run]()
    for number in range(plan.runs):
        agents = machine(plan.cores)
        harnesses = [Process(agents, turn_seconds=WHOLE) for _ in range(plan.harnesses)]
        runs.append(Run(f"run-{number}", cluster, costs, harnesses, random.Random(number)))
    async with asyncio.TaskGroup() as tasks:
        trainer = tasks.create_task(cluster.work())
        await asyncio.gather(*[tasks.create_task(run.train(tasks)) for run in runs])
        trainer.cancel()
        figures = figures_of(cluster, runs, asyncio.get_running_loop().time())
    for gateway in cluster.gateways.values():
        await gateway.pool.close()
    return figures


def figures_of(cluster: Cluster, runs: Sequence[Run], seconds: float) -> dict[str, Any]:
    engines, gateways = cluster.engines.values(), cluster.gateways.values()
    harnesses = [harness for run in runs for harness in run.harnesses]
    shares = {
        "harness": max(harness.seconds for harness in harnesses) / seconds,
        "busiest gateway": max(gateway.process.seconds for gateway in gateways) / seconds,
        "engines": statistics.mean(engine.busy for engine in engines) / seconds,
        "trainer": (cluster.train_seconds + sum(cluster.publications)) / seconds,
    }
    ages = sum((run.ages for run in runs), Counter[int]())
    most = [engine.most for engine in engines]
    tokens = [run.trained_tokens for run in runs]
    return {
        "simulated_seconds": round(seconds, 1),
        "rollouts_per_minute": round(sum(run.finished_rollouts for run in runs) / seconds * 60),
        "calls_per_second": round(sum(run.calls for run in runs) / seconds, 1),
        "steps_per_hour_of_a_run": round(runs[0].version / seconds * 3600, 1),
        "waited_for_rollouts_share": round(sum(run.waited_seconds for run in runs) / len(runs) / seconds, 3),
        "publication_seconds": round(statistics.median(cluster.publications), 1),
        "groups_by_age": {str(age): count for age, count in sorted(ages.items())},
        "stale_groups": sum(run.stale for run in runs),
        "most_calls_on_an_engine": max(most),
        "mean_of_the_most": round(statistics.mean(most), 1),
        "tokens_of_a_run_to_mean": round(max(tokens) / statistics.mean(tokens), 3),
        "share_of_time": {name: round(share, 3) for name, share in shares.items()},
        "limit": max(shares, key=lambda name: shares[name]),
    }


PLANS = {
    "one run": Plan(),
    "one gateway": Plan(gateways=1),
    "one process of agents": Plan(harnesses=1),
    "ten runs": Plan(runs=10),
}


def nodes_part(costs: Costs) -> dict[str, Any]:
    """Simulate each plan; say how it differs from the first."""
    known = asdict(PLANS["one run"])
    return {"plan": known} | {name: virtually(simulate(plan, costs)) for name, plan in PLANS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    figures: dict[str, Any] = {
        "cpu": this_cpu(),
        "load_average_before": [round(value, 1) for value in os.getloadavg()],
    }
    figures |= gate_part(os.cpu_count() or 1)
    if figures["gate_passed"]:
        costs = Costs(**{name: statistics.median(each) for name, each in figures["costs_1"].items()})
        figures["nodes"] = nodes_part(costs)
    show(figures, as_json=given.json)
    raise SystemExit(0 if figures["gate_passed"] else 1)


if __name__ == "__main__":
    main()
