"""Every model call is accounted for: seen = trained + context-only + dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from insitu.gateway_client import GatewayClient, RolloutRecord
from insitu.harness.collect.group_builder import GroupBuilder
from insitu.harness.collect.recorded_calls import read_rollout
from insitu.harness.collect.targets import Targets
from insitu.harness.interfaces.settings import BuilderConfig, TrainerConfig
from insitu.harness.interfaces.training_job import TrainingJobRef, TrainingJobStatus
from insitu.harness.loop.epoch_trainer import EpochTrainer
from insitu.harness.rollouts.capture import Capture, CaptureMismatch, add_up
from insitu.harness.rollouts.rollout import Rollout, RolloutFigures
from insitu.rewards.evaluator import Evaluator
from insitu.rewards.items import EvalItem, EvalResult
from insitu.rewards.judges.judged_rollout import judged_rollout
from insitu.testing.standin_gateway import StandinGateway
from insitu.testing.standins import (
    STANDIN_MODEL,
    StandinAdapter,
    StandinBuilder,
    StandinGatewayClient,
    StandinParts,
    make_run,
)
from insitu.types import Ending
from insitu.workflow.outcome import Outcome

TARGETS = Targets("run", frozenset({"planner"}))


def call(name: str, **fields: Any) -> dict[str, Any]:
    given = {"id": name, "run": "run", "model": "run", "function": "planner", "finish_reason": "stop"}
    return {**given, "policy_step": 0, "num_output_tokens": 1, **fields}


class ScriptedGatewayClient(StandinGatewayClient):
    """Answers with one record after the other, the last one for ever."""

    def __init__(self, *records: RolloutRecord) -> None:
        super().__init__("standin-run")
        self.records, self.num_read = records, 0

    async def rollout_record(
        self, rollout_id: str, *, tokens: bool = True, pieces: bool = False
    ) -> RolloutRecord:
        del rollout_id, tokens, pieces
        self.num_read += 1
        return self.records[min(self.num_read, len(self.records)) - 1]


async def capture(*records: RolloutRecord) -> Capture:
    return (await read_rollout(ScriptedGatewayClient(*records), TARGETS, "r")).capture


async def test_every_call_has_one_place() -> None:
    calls = [
        call("a"),
        call("b", function="worker"),
        call("c", run=None, model="base"),
        call("d", finish_reason="cancelled"),
        call("e"),
    ]
    found = await capture(RolloutRecord(calls, 8, {"refused": 2, "failed": 1}))
    assert found == Capture(
        seen=8,
        trained=2,
        context_only={"other_function": 1, "other_model": 1},
        dropped={"incomplete": 1, "unrecorded": 3},
    )
    assert found.balanced


async def test_a_gateway_without_a_count_is_said_to_have_none() -> None:
    found = await capture(RolloutRecord([call("a"), call("b", function="worker")], None))
    assert found == Capture(uncounted=2, trained=1, context_only={"other_function": 1})
    assert found.balanced
    assert found.line() == (
        "calls 0 seen and 2 not counted by the gateway = 1 trained + 1 context-only (other-function 1)"
    )


@pytest.mark.parametrize(("seen", "ending"), [(1, Ending.COMPLETED), (None, Ending.INFRASTRUCTURE)])
async def test_a_rollout_without_a_count_of_its_calls_is_not_trained_on(
    seen: int | None, ending: Ending
) -> None:
    """After a restart of the gateway, nobody knows whether the calls on record are all of them."""
    calls = await read_rollout(ScriptedGatewayClient(RolloutRecord([call("a")], seen)), TARGETS, "r")
    assert calls.corrected(Outcome(Ending.COMPLETED, "said", "", 0.0)).ending is ending


async def test_a_call_that_is_being_recorded_is_waited_for() -> None:
    broken = call("b", finish_reason="cancelled")
    late = [
        RolloutRecord([call("a")], 2, {}, 1),
        RolloutRecord([call("a")], 2),
        RolloutRecord([call("a"), broken], 2),
    ]
    assert await capture(*late) == Capture(seen=2, trained=1, dropped={"incomplete": 1})


async def test_a_call_that_goes_on_after_the_agent_is_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insitu.harness.collect.recorded_calls._PAUSES_SECONDS", (0.0, 0.0))
    found = await capture(RolloutRecord([call("a")], 2, {}, 1))
    assert found == Capture(seen=2, trained=1, dropped={"unfinished": 1})


async def test_a_lost_record_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insitu.harness.collect.recorded_calls._PAUSES_SECONDS", (0.0, 0.0))
    found = await capture(RolloutRecord([call("a")], 2))
    assert not found.balanced
    assert (found.total, found.accounted) == (2, 1)


async def test_what_comes_after_the_agent_is_never_trained() -> None:
    first = await read_rollout(ScriptedGatewayClient(RolloutRecord([call("a")], 1)), TARGETS, "r")
    later = [call("a"), call("b"), call("c", function="<evaluator>"), call("d", run=None, model="base")]
    again = await read_rollout(ScriptedGatewayClient(RolloutRecord(later, 4)), TARGETS, "r", first)
    assert list(again.call_ids) == ["a"]
    assert again.capture == Capture(
        seen=4, trained=1, context_only={"other_function": 1, "other_model": 1}, dropped={"late": 1}
    )


def test_captures_add_up_and_come_back_from_files() -> None:
    one = Capture(seen=3, trained=1, context_only={"other_model": 2})
    two = Capture(uncounted=4, trained=1, context_only={"other_model": 1}, dropped={"incomplete": 2})
    both = add_up([one, two])
    assert both == Capture(3, 4, 2, {"other_model": 3}, {"incomplete": 2})
    assert both.balanced
    assert Capture.from_dict(both.to_dict()) == both
    rollout = Rollout("r", "e", 0, Ending.COMPLETED, 1.0, call_ids=("a", "b"))
    assert replace(rollout, figures=RolloutFigures(capture=both)).capture == both
    assert rollout.capture == Capture(uncounted=2, trained=2)
    assert two.without_training("failed").dropped == {"incomplete": 2, "failed": 1}


def test_the_line_of_the_design() -> None:
    made = Capture(
        seen=512,
        trained=300,
        context_only={"other_model": 64, "other_function": 76},
        dropped={"failed": 24, "zero_variance": 48},
    )
    assert made.balanced
    assert made.line() == (
        "calls 512 seen = 300 trained + 140 context-only (other-function 76, other-model 64)"
        " + 72 dropped (48 zero-variance, 24 failed)"
    )


async def test_a_mismatch_fails_the_epoch_and_names_the_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.harness.collect.recorded_calls._PAUSES_SECONDS", ())
    run = make_run(tmp_path)
    lossy = ScriptedGatewayClient(
        RolloutRecord([call("a", run="standin-run", model="standin-run", function=None)], 2)
    )
    with run.directory:
        builder = GroupBuilder(BuilderConfig.model_validate({"_type": "insitu"}), StandinParts(tmp_path))
        await builder.initialize(replace(run, gateway=lossy))
        await builder.start_run(run.run_id, epoch=0)
        with pytest.raises(CaptureMismatch) as caught:
            await builder.finalize(run.run_id, epoch=0)
    assert "6 rollouts made other model calls than were recorded" in caught.value.message
    assert f"{run.run_id}.e0.0.0." in caught.value.message
    assert "calls 2 seen = 1 trained, +1" in caught.value.message
    assert "epoch-0000-failed-1.jsonl" in caught.value.hint
    assert (tmp_path / "run" / "trajectories" / "epoch-0000-failed-1.jsonl").exists()


class Judge(Evaluator):
    """Marks its call as a judge behind the same gateway does."""

    async def evaluate_item(self, item: EvalItem) -> EvalResult:
        await asyncio.sleep(0)
        judged = judged_rollout()
        assert judged is not None
        assert judged.headers("http://elsewhere/v1") == {}
        headers = judged.headers(f"{STANDIN_MODEL.gateway_url}/v1/")
        assert headers == {"x-insitu-rollout": item.rollout_id, "x-insitu-function": "<evaluator>"}
        return EvalResult(item.id, float(item.rollout_id.split(".")[3]))


class GrowingGatewayClient(StandinGatewayClient):
    """After the first look at a rollout it has a judge's call as well."""

    async def rollout_record(
        self, rollout_id: str, *, tokens: bool = True, pieces: bool = False
    ) -> RolloutRecord:
        record = await super().rollout_record(rollout_id, tokens=tokens, pieces=pieces)
        known: set[str] = self.__dict__.setdefault("known", set[str]())
        if rollout_id not in known:
            known.add(rollout_id)
            return record
        judge = {**record.calls[0], "id": f"judge-{rollout_id}", "function": "<evaluator>"}
        return RolloutRecord([*record.calls, judge], 2)


async def test_what_a_judge_asks_is_in_the_account(tmp_path: Path) -> None:
    run = make_run(tmp_path, evaluator=Judge())
    with run.directory:
        builder = GroupBuilder(BuilderConfig.model_validate({"_type": "insitu"}), StandinParts(tmp_path))
        await builder.initialize(replace(run, gateway=GrowingGatewayClient("standin-run")))
        await builder.start_run(run.run_id, epoch=0)
        collection = await builder.finalize(run.run_id, epoch=0)
    trajectories = [each for group in collection.trajectories for each in group]
    captures = [each.capture for each in trajectories]
    assert captures == [Capture(seen=2, trained=1, context_only={"other_function": 1})] * 6
    assert {tuple(each.call_ids) for each in trajectories} == {
        (f"call-{t.rollout_id}",) for t in trajectories
    }
    assert all(_functions(each.read_calls()) == [None, "<evaluator>"] for each in trajectories)


def _functions(calls: Sequence[Any]) -> list[Any]:
    return [each["function"] for each in calls]


class Miscounting(StandinAdapter):
    """Says that it trained one call less than it was given."""

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        status = await super().status(ref)
        status.metadata["metrics"]["account/calls_trained"] -= 1
        return status


async def test_a_backend_that_counts_other_calls_fails_the_epoch_for_good(
    tmp_path: Path,
) -> None:
    for _ in range(2):
        trainer = EpochTrainer(TrainerConfig.model_validate({"_type": "insitu"}), StandinParts(tmp_path))
        run = make_run(tmp_path)
        with run.directory:
            await trainer.bind_components(StandinBuilder(), Miscounting(JOBS))
            await trainer.initialize(run)
            with pytest.raises(CaptureMismatch, match=r"6 model calls were submitted .* 5 of 6: 5 trained"):
                await trainer.run(1)
            metrics = await trainer.get_metrics(run.run_id)
            await trainer.cleanup()
        assert metrics["epochs"] == []
    assert len(JOBS) == 1, "what was trained is not trained again"


JOBS: dict[str, Any] = {}


async def test_the_standin_gateway_counts_as_the_true_one_does() -> None:
    async with StandinGateway(lambda _rollout, _body: "hello") as gateway, aiohttp.ClientSession() as http:
        async with GatewayClient(gateway.url, "key") as client:
            url = f"{gateway.url}/rollouts/ro/v1/chat/completions"
            async with http.post(url, json={"model": "standin-run", "messages": []}) as got:
                assert got.status == 200
            record = await client.rollout_record("ro")
            assert record == RolloutRecord([], 1, {"standin": 1}, 0)
            assert await client.rollout_record("other") == RolloutRecord([], 0)


async def test_a_rollout_with_an_unknown_count_is_never_trained_on() -> None:
    for seen, ending in ((1, Ending.COMPLETED), (None, Ending.INFRASTRUCTURE)):
        client = ScriptedGatewayClient(RolloutRecord([call("c")], seen))
        found = await read_rollout(client, TARGETS, "r")
        corrected = found.corrected(Outcome(Ending.COMPLETED, None, "", 1.0))
        assert corrected.ending is ending
        assert ("restarted" in corrected.reason) is (seen is None)
