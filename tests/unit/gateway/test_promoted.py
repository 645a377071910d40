"""A promoted step: calls to the run's plain name get it, rollouts get the newest step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gateway.conftest import GatewayUnderTest


def adapters(*steps: int, promoted: int | None) -> dict[str, Any]:
    served = {str(s): {"engine_model": f"run@{s}", "version": f"run@{s}"} for s in steps}
    return {"run": {"latest": 3, "served": served, "promoted": promoted}}


@pytest.fixture
async def promoted(gateway: GatewayUnderTest) -> GatewayUnderTest:
    gateway.engine.behaviour.adapters = ["run@1", "run@2", "run@3"]
    await gateway.put_table(runs=adapters(1, 2, 3, promoted=1))
    return gateway


async def version_of(gateway: GatewayUnderTest, model: str, *at: Any, **more: Any) -> str:
    """The version that a call records, which the engine itself reported."""
    status, body, call_id = await gateway.post(*at, model=model, **more)
    assert status == 200, body
    record = next(r for r in await gateway.records() if r.id == call_id)
    assert record.policy_version == f"run@{record.policy_step}"
    return record.policy_version


async def test_plain_calls_get_the_promoted_step(promoted: GatewayUnderTest) -> None:
    assert await version_of(promoted, "run") == "run@1"
    for step in (1, 2, 3):
        assert await version_of(promoted, f"run@{step}") == f"run@{step}"
    await promoted.put_table(runs=adapters(1, 2, 3, promoted=None))
    assert await version_of(promoted, "run") == "run@3"


@pytest.mark.parametrize("prefix", ["/rollouts/r1", "/rollouts/r1/functions/f"])
async def test_rollouts_get_the_newest_step(promoted: GatewayUnderTest, prefix: str) -> None:
    assert await version_of(promoted, "run", f"{prefix}/v1/chat/completions") == "run@3"
    assert await version_of(promoted, "run", headers={"x-insitu-rollout": "r2"}) == "run@3"
    assert await version_of(promoted, "run@1", f"{prefix}/v1/chat/completions") == "run@1"


async def test_no_other_step_stands_in_for_one_that_cannot_be_loaded(promoted: GatewayUnderTest) -> None:
    await promoted.put_table(runs=adapters(2, 3, promoted=1))
    status, body, _ = await promoted.post(model="run")
    assert status == 404
    assert "Step 1 of run `run`, which is promoted, could not be loaded" in body["error"]["message"]
    assert body["error"]["hint"] == "served steps: run@2, run@3"
    assert await version_of(promoted, "run", "/rollouts/r1/v1/chat/completions") == "run@3"
