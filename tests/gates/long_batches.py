"""From the record store to the ranks at full size: `python -m tests.gates.long_batches <folder> <sizes>`.

Runs in a process of its own, which stands for the supervisor, so that its memory can be measured. Everything
is real but the arithmetic: the store, the batch, the plan, Ray, and the tensors on the ranks.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.experimental import get_object_locations

from insitu.backend.batch import make_batch
from insitu.backend.fleet import trainer
from insitu.backend.fleet.cluster import start_ray, stop_ray
from insitu.backend.fleet.rank_info import LoadedRank, RankArguments
from insitu.backend.fleet.trainer import TrainerGroup, _RankActor
from insitu.backend.plan.compute import Asked, choose
from insitu.backend.plan.cpu import read_cpu
from insitu.backend.plan.settings import ServeSettings
from insitu.records.store import RecordStore
from insitu.training.packing import RankBatch
from insitu.types import ModelCall, StepSettings, Trajectory, TrajectoryGroup

GROUP = 8
VOCABULARY = 150_000
SAMPLING = {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 4096}


@dataclass(frozen=True)
class Sizes:
    num_rollouts: int
    num_tokens: int
    """Of each rollout."""
    num_turns: int
    num_ranks: int


class StandinArithmetic:
    """A rank that receives its micro-batches and makes tensors of them, but computes nothing."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._info = {"rank": rank, "world_size": world_size}
        self._sampler: list[NDArray[np.float32]] = []

    def train_step(self, run: str, batch: RankBatch, settings: StepSettings, reference: object) -> object:
        from insitu.training.batching import collate

        sums = {"tokens": 0, "sampled": 0, "sampler": 0.0, "ids": 0}
        self._sampler = []
        for part in batch.parts():
            made = collate(part)
            if made.is_filler:
                continue
            sums["tokens"] += int(part.columns.length_n.sum())
            sums["ids"] += int(part.columns.ids_l.sum())
            sums["sampled"] += len(made.pick_t)
            sums["sampler"] += float(made.sampler_t.double().sum())
            self._sampler.append(made.sampler_t.numpy())
        return sums

    def token_logprobs(self) -> NDArray[np.float32]:
        """The sampler's, in place of its own."""
        kept, self._sampler = self._sampler, []
        return np.concatenate(kept) if kept else np.empty(0, np.float32)


class StandinRankActor(_RankActor):
    def load(self, arguments: RankArguments) -> LoadedRank:
        import torch

        torch.set_num_threads(1)
        self._rank = StandinArithmetic(arguments["rank"], arguments["world_size"])  # type: ignore[assignment]
        limits = {"vocabulary_size": VOCABULARY, "max_length": None, "max_micro_batch_tokens": 2048}
        return {**limits, "can_branch": True, "linear_layers": [], "pid": os.getpid()}  # type: ignore[typeddict-item]


def fill(records: RecordStore, sizes: Sizes) -> list[TrajectoryGroup]:
    """Agents that read a third and write two thirds; a group shares its first prompt."""
    random = np.random.default_rng(0)
    turn = sizes.num_tokens // sizes.num_turns
    told = turn // 3
    groups: list[TrajectoryGroup] = []
    for first in range(0, sizes.num_rollouts, GROUP):
        prompt = random.integers(0, VOCABULARY, told).tolist()
        rated: list[Trajectory] = []
        for number in range(first, first + GROUP):
            calls = _rollout(random, f"ro-{number}", prompt, sizes, turn, told)
            records.append(calls)
            rated.append(Trajectory(f"ro-{number}", [call.id for call in calls], float(number % GROUP)))
        groups.append(TrajectoryGroup(f"g-{first}", "run", rated))
    return groups


def _rollout(
    random: np.random.Generator, name: str, prompt: list[int], sizes: Sizes, turn: int, told: int
) -> list[ModelCall]:
    calls: list[ModelCall] = []
    messages: list[dict[str, Any]] = [{"role": "user", "content": "look " * told}]
    ids = prompt
    for number in range(sizes.num_turns):
        if number:
            ids = ids + random.integers(0, VOCABULARY, told).tolist()
            messages = [*messages, {"role": "tool", "content": f"{number} " * told}]
        output = random.integers(0, VOCABULARY, turn - told).tolist()
        logprobs = (-random.random(len(output), dtype=np.float32)).tolist()
        calls.append(
            ModelCall(
                f"{name}-{number}", name, "run", "run", 0, "run@0", ids, output, logprobs, "stop",
                messages=messages, sampling=SAMPLING,
            )
        )  # fmt: skip
        messages = [*messages, {"role": "assistant", "content": "done " * (turn - told)}]
        ids = ids + output
    return calls


@dataclass
class Peak:
    """The most memory of this process since `watched` began, in bytes: its own, and with shared memory."""

    own: int = 0
    all: int = 0


def _memory() -> tuple[int, int]:
    status = Path("/proc/self/status").read_text()
    kinds = {kind: int(kb) * 1024 for kind, kb in re.findall(r"(Rss\w+):\s+(\d+) kB", status)}
    return kinds["RssAnon"], sum(kinds.values())


@contextmanager
def watched() -> Iterator[Peak]:
    gc.collect()
    peak, before, done = Peak(), _memory(), threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            own, all_ = _memory()
            peak.own, peak.all = max(peak.own, own - before[0]), max(peak.all, all_ - before[1])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


async def longest_stall(stop: asyncio.Event) -> float:
    """The longest that the event loop kept a timer of 10 ms waiting."""
    worst = 0.0
    while not stop.is_set():
        started = time.perf_counter()
        await asyncio.sleep(0.01)
        worst = max(worst, time.perf_counter() - started - 0.01)
    return worst


async def step(
    records: RecordStore, groups: list[TrajectoryGroup], group: TrainerGroup, sent: list[Any]
) -> dict[str, float]:
    """From stored groups to tensors on every rank, with the figures of the way."""
    stop = asyncio.Event()
    stalls = asyncio.create_task(longest_stall(stop))
    await asyncio.sleep(0.05)
    with watched() as peak:
        started = time.perf_counter()
        batch = await asyncio.to_thread(make_batch, groups, records, StepSettings(), 0)
        collected = time.perf_counter()
        await group.train_step("run", batch.sequences, StepSettings(), None)
        seconds = time.perf_counter() - started
    stop.set()
    num_tokens = sum(len(sequence.token_ids) for sequence in batch.sequences)
    wire = sum(found["object_size"] for found in get_object_locations(sent).values())
    return {
        "seconds": seconds,
        "collect_seconds": collected - started,
        "num_tokens": num_tokens,
        "bytes_per_token": wire / num_tokens,
        "own_mb": peak.own / 1e6,
        "all_mb": peak.all / 1e6,
        "stall_seconds": await stalls,
        "expected_ids": float(sum(int(s.token_ids.sum(dtype=np.int64)) for s in batch.sequences)),
        "expected_sampler": float(sum(s.logprobs.sum(dtype=np.float64) for s in batch.sequences)),
    }


async def measure(folder: Path, sizes: Sizes) -> dict[str, float]:
    records = RecordStore(f"sqlite:///{folder / 'calls.db'}")
    started = time.perf_counter()
    groups = fill(records, sizes)
    filled = time.perf_counter() - started
    compute = choose(read_cpu(), "cpu", Asked(dtype="float32"), num_ranks=sizes.num_ranks)
    settings = ServeSettings(folder, "cpu", compute, "merged", "shared", "default", num_ranks=sizes.num_ranks)
    settings.logs_dir.mkdir(parents=True, exist_ok=True)
    group = TrainerGroup(settings, "standin", StandinRankActor)
    sent: list[Any] = []
    real, results = trainer._sent, []

    def noted(packing: Any) -> list[Any]:
        sent.extend(made := real(packing))
        return made

    async def together(calls: Any, *rest: Any) -> Any:
        found = await TrainerGroup._together(group, calls, *rest)
        results.extend(each for each in found if isinstance(each, dict))
        return found

    trainer._sent = noted
    await group.start()
    group._together = together  # type: ignore[method-assign]
    group.opened["run"] = 0
    try:
        figures = await step(records, groups, group, sent)
    finally:
        await group.stop()
    received = {name: sum(each[name] for each in results) for name in results[0]}
    return {**figures, "fill_seconds": filled, **{f"received_{k}": v for k, v in received.items()}}


def main() -> None:
    folder, sizes = Path(sys.argv[1]), Sizes(*map(int, sys.argv[2:6]))
    start_ray(None, folder, folder)
    try:
        print(json.dumps(asyncio.run(measure(folder, sizes))))
    finally:
        stop_ray()
        ray.shutdown()


if __name__ == "__main__":
    main()
