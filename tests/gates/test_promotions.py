"""Promoted steps on a pretended device: plain calls get them, rollouts and training go on with the newest,
through steps, restarts and damage."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from insitu.backend.ledger import Promotion
from insitu.backend.serving import promotions
from insitu.types import JobState, RunState
from tests.gates.test_checkpoint_fallback import flip
from tests.gates.test_device import World, in_memory, model, running, scores
from tests.gates.test_version_leases import released, taken, trained, until, working
from tests.support.pretended_device import SMALL, StandinScores

pytestmark = pytest.mark.timeout(300)
__all__ = ["in_memory", "model", "scores"]  # fixtures of the same world


@pytest.fixture(autouse=True)
def quick_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotions, "_AGAIN_SECONDS", 0.05)


async def promoted(world: World, step: int | None) -> Promotion:
    """Promote a step and wait until it is served."""
    made = world.ledger.promote("run", step)
    await until(lambda: now(world).reason == "", f"step {step} is served")
    return made


def now(world: World) -> Promotion:
    return world.ledger.current_promotions()["run"]


async def answered_by(world: World, rollout: str = "") -> str:
    """The version that a call to the plain name was answered by, as the engine reported it."""
    prefix = f"/rollouts/{rollout}" if rollout else ""
    body = {"model": "run", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    url = f"{world.traffic.gateway_urls[0]}{prefix}/v1/chat/completions"
    async with world.traffic.http.post(url, json=body, headers={"authorization": "Bearer default"}) as answer:
        assert answer.status == 200, await answer.text()
        call_id = answer.headers["x-insitu-call-id"]
    await until(lambda: bool(world.records.exists([call_id])), "the call is recorded")
    (call,) = world.records.get([call_id])
    return call.policy_version.partition("#")[0]


def loaded(world: World) -> set[str]:
    """The steps that the engine has."""
    return {name.partition("#")[0] for name in world.engine._paths}


async def test_training_goes_on_while_plain_calls_get_the_promoted_step(
    in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with working(in_memory / "plain", model, scores, "adapter") as world:
        for step in range(2, 6):
            await trained(world, world.queue("run", step))
        wanted = world.learned("run", 6)
    async with working(in_memory / "promoted", model, scores, "adapter") as world:
        await promoted(world, 1)
        for step in range(2, 6):
            await trained(world, world.queue("run", step))
            assert await answered_by(world) == "run@1"
            assert await answered_by(world, f"ro-{step}") == f"run@{step + 1}"
        assert world.learned("run", 6) == wanted, "the same bytes as without a promotion"
        kept = [checkpoint.step for checkpoint in world.ledger.checkpoints("run")]
        assert 1 in kept
        assert 2 not in kept
        await world.engine.stop()  # killed: it comes back with the promoted step
        await world.settled()
        assert await answered_by(world) == "run@1"
        await promoted(world, 5)
        assert await answered_by(world) == "run@5"
        await until(lambda: loaded(world) == {"run@5", "run@6"}, "step 1 is unloaded")
        world.ledger.roll_back("run", now(world).id)
        await until(lambda: now(world).reason == "", "the rollback")
        assert await answered_by(world) == "run@1"
        await promoted(world, None)
        assert await answered_by(world) == "run@6"
        await until(lambda: loaded(world) == {"run@5", "run@6"}, "step 1 is unloaded again")


async def test_the_choice_outlives_a_restart_from_the_first_call_on(
    in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with working(in_memory / "state", model, scores, "adapter", num_steps=4) as world:
        await promoted(world, 2)
    started = time.time()
    async with running(in_memory / "state", SMALL, model, scores, "adapter") as world:
        # No work loop yet: the first table has it.
        assert await answered_by(world) == "run@2"
        assert await answered_by(world, "ro") == "run@4"
        assert await world.submit("run", 4) is JobState.SUCCEEDED
        assert await answered_by(world) == "run@2"
        plain = [call for call in world.records.of_run("run", 0) if call.rollout_id is None]
        since = [call.policy_step for call in plain if call.started_at > started]
        assert set(since) == {2}, "no call got another step, not even the first"


async def test_a_crash_after_the_decision_serves_it_at_the_next_start(
    in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with running(in_memory / "state", SMALL, model, scores, "adapter") as world:
        for step in range(3):
            assert await world.submit("run", step) is JobState.SUCCEEDED
        world.ledger.promote("run", 1)  # no work loop: the supervisor never sees it
        assert await answered_by(world) == "run@3"
    async with running(in_memory / "state", SMALL, model, scores, "adapter") as world:
        assert await answered_by(world) == "run@1"
        assert now(world).reason == ""


async def test_a_lease_and_a_promotion_of_one_step_do_not_end_each_other(
    in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with working(in_memory / "state", model, scores, "adapter", num_steps=3) as world:
        await promoted(world, 1)
        await taken(world, 1)
        await promoted(world, None)
        assert await world.call("run@1") == 200
        await released(world)
        assert "run@1" not in loaded(world)
        await taken(world, 1, "two")
        await promoted(world, 1)
        await released(world, "two")
        assert await answered_by(world) == "run@1"


async def test_a_step_that_does_not_load_replaces_nothing(
    in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with working(in_memory / "state", model, scores, "adapter", num_steps=3) as world:
        await promoted(world, 2)
        whole = flip(world, 1, "adapter/adapter_model.safetensors")
        world.ledger.promote("run", 1)
        await until(lambda: "adapter_model.safetensors" in now(world).reason, "the reason is recorded")
        assert await answered_by(world) == "run@2"
        whole()
        await until(lambda: now(world).reason == "", "a later try succeeds")
        assert await answered_by(world) == "run@1"


async def test_nothing_stands_in_for_a_damaged_step_after_a_restart(
    in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with working(in_memory / "state", model, scores, "adapter", num_steps=3) as world:
        await promoted(world, 1)
        whole = flip(world, 1, "adapter/adapter_model.safetensors")
        world.called = "run@3"
    async with running(in_memory / "state", SMALL, model, scores, "adapter") as world:
        assert world.ledger.get_run("run").state is RunState.READY
        assert await world.call("run") == 404
        assert await answered_by(world, "ro") == "run@3"
        whole()
        await until(lambda: world.registrar._promotions._again_at["run"] > 0, "the try")
        world.called = "run@3"
        for _ in range(100):
            await world.registrar.admit_runs()
            if now(world).reason == "":
                break
        assert await answered_by(world) == "run@1"


async def test_merged_publication_does_not_open_a_run_with_a_promotion(
    in_memory: Path, model: Path, scores: StandinScores
) -> None:
    async with working(in_memory / "state", model, scores, "adapter", num_steps=3) as world:
        await promoted(world, 1)
    with pytest.raises(AssertionError, match="insitu promote run --newest"):
        async with running(in_memory / "state", SMALL, model, scores, "merged"):
            pytest.fail("the run is served")
