"""benchmarks/simulation.py: virtual time, shared resources, and a small cluster with the real rules."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

pytest.importorskip("ray", reason="the backend's rules come with its dependencies")

from benchmarks.simulation import Costs, Plan, simulate, virtually
from benchmarks.virtual_time import Process, Shared, machine

SMALL = Plan(nodes=3, gateways=2, harnesses=2, rollouts=64, groups_per_step=4, steps=4)
COSTS = Costs(client=0.001, gateway=0.005, engine=0.001, waiting=0.003)


def took(*works: Callable[[], Awaitable[None]]) -> float:
    """Return the virtual seconds until all work is done."""

    async def measured() -> float:
        await asyncio.gather(*[work() for work in works])
        return asyncio.get_running_loop().time()

    return virtually(measured())


def test_virtual_time_passes_at_once() -> None:
    began = time.monotonic()
    assert took(lambda: asyncio.sleep(3600)) == 3600
    assert time.monotonic() - began < 60


def test_what_waits_for_nothing_is_an_error() -> None:
    async def stuck() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="nothing is left to happen"):
        virtually(stuck())


def test_users_of_a_resource_slow_each_other_down() -> None:
    shared = Shared(lambda users: 1 / users)
    assert took(lambda: shared.use(1.0), lambda: shared.use(2.0)) == pytest.approx(3.0)
    assert shared.busy == pytest.approx(3.0)
    assert shared.most == 2


def test_a_process_has_one_core_and_a_machine_several() -> None:
    cores = machine(2)
    alone = Process(cores)
    assert took(lambda: alone.compute(1.0), lambda: alone.compute(1.0)) == pytest.approx(2.0)
    crowded = machine(2)
    processes = [Process(crowded) for _ in range(4)]
    assert took(*[lambda each=each: each.compute(1.0) for each in processes]) == pytest.approx(2.0)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_no_group_is_trained_beyond_the_bound(bound: int) -> None:
    figures = virtually(simulate(replace(SMALL, bound=bound), COSTS))
    ages = figures["groups_by_age"]
    assert sum(ages.values()) == SMALL.steps * SMALL.groups_per_step
    assert max(map(int, ages)) == bound


def test_runs_train_on_equal_shares() -> None:
    figures = virtually(simulate(replace(SMALL, runs=4, groups_per_step=16, steps=6), COSTS))
    assert figures["tokens_of_a_run_to_mean"] < 1.2


def test_a_slow_trainer_limits() -> None:
    figures = virtually(simulate(replace(SMALL, train_tokens_per_second=100.0), COSTS))
    assert figures["limit"] == "trainer"
    assert figures["share_of_time"]["trainer"] > 0.8
