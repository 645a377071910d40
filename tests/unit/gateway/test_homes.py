"""Many runs on few replicas: each run has homes, so that an engine has few adapters to compute at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator

import pytest

from insitu.gateway.engines.replicas import ReplicaPool
from insitu.gateway.shared.settings import Limits
from insitu.wire.engine import MAX_LORAS

NUM_REPLICAS, NUM_RUNS = 8, 16
RUNS = [f"run-{number}" for number in range(NUM_RUNS)]


@pytest.fixture
async def pool() -> AsyncIterator[ReplicaPool]:
    made = ReplicaPool(Limits(), lambda: None, "")
    made.sync({f"replica-{number}": f"http://127.0.0.1:{number + 1}" for number in range(NUM_REPLICAS)})
    yield made
    await made.close()


def used(pool: ReplicaPool, run: str, num_runs: int) -> set[str]:
    """The replicas that get the calls of a run."""
    chosen = [pool.choose(f"{run}.{rollout}", run=run, num_runs=num_runs) for rollout in range(60)]
    return {replica.id for replica in chosen if replica is not None}


async def test_each_run_has_its_homes(pool: ReplicaPool) -> None:
    homes = {run: used(pool, run, NUM_RUNS) for run in RUNS}
    assert {len(each) for each in homes.values()} == {NUM_REPLICAS * MAX_LORAS // NUM_RUNS}
    runs = defaultdict[str, list[str]](list)
    for run, each in homes.items():
        for replica in each:
            runs[replica].append(run)
    assert len(runs) == NUM_REPLICAS, "all replicas have something to do"
    assert max(map(len, runs.values())) <= 2 * MAX_LORAS


async def test_few_runs_use_all_replicas(pool: ReplicaPool) -> None:
    for num_runs in range(1, MAX_LORAS + 1):
        assert len(used(pool, "run-0", num_runs)) == NUM_REPLICAS


async def test_engines_that_compute_more_adapters_at_once_serve_more_runs(pool: ReplicaPool) -> None:
    addresses = {name: replica.engine.url for name, replica in pool.replicas.items()}
    pool.sync(addresses, max_loras=NUM_RUNS)
    assert len(used(pool, "run-0", NUM_RUNS)) == NUM_REPLICAS
    pool.sync(addresses, max_loras=2)
    assert len(used(pool, "run-0", NUM_RUNS)) == 1


async def test_full_weights_use_all_replicas(pool: ReplicaPool) -> None:
    chosen = {pool.choose(f"rollout-{number}", num_runs=NUM_RUNS) for number in range(100)}
    assert len(chosen) == NUM_REPLICAS


async def test_a_run_moves_on_when_its_home_is_out_and_the_other_home_stays(pool: ReplicaPool) -> None:
    homes = used(pool, "run-0", NUM_RUNS)
    lost = min(homes)
    pool.replicas[lost].healthy = False
    after = used(pool, "run-0", NUM_RUNS)
    assert lost not in after
    assert homes - {lost} <= after
    assert len(after) == len(homes)


async def test_a_call_spills_to_any_replica(pool: ReplicaPool) -> None:
    homes = used(pool, "run-0", NUM_RUNS)
    for name in homes:
        pool.replicas[name].in_flight = 100
    chosen = pool.choose("run-0.1", run="run-0", num_runs=NUM_RUNS)
    assert chosen is not None
    assert chosen.id not in homes
    assert pool.num_spilled == 1


async def test_a_call_without_a_rollout_goes_to_the_least_loaded_home(pool: ReplicaPool) -> None:
    first, second = sorted(used(pool, "run-0", NUM_RUNS))
    pool.replicas[first].in_flight = 1
    chosen = pool.choose(None, run="run-0", num_runs=NUM_RUNS)
    assert chosen is not None
    assert chosen.id == second
