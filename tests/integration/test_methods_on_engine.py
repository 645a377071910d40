"""sft, dpo and distill end to end: what a step teaches is what the engine then says."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import aiohttp
import pytest

from insitu.client import InsituClient
from insitu.errors import CannotHonour, NotFound
from insitu.records.store import RecordStore
from insitu.testing.models import tiny
from insitu.types import LoraSettings, ModelCall, StepSettings, Trajectory, TrajectoryGroup
from insitu.wire.answers import JobInfo
from tests.support.addition import Rollouts, train
from tests.support.backend import Backend, running_backend
from tests.support.vllm_server import VllmServer

FAST = 1e-2
TEACHER_KEY = "key-of-the-teacher-5f2c"


@pytest.mark.timeout(600)
async def test_every_method_teaches_what_the_engine_then_says(
    tmp_path: Path, vllm_tiny: VllmServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSITU_TEACHER_KEY_ELSEWHERE", TEACHER_KEY)
    arguments = ["--model", str(tiny()), "--model-name", "tiny", "--dtype", "float32"]
    arguments += ["--publication", "adapter", "--placement", "dedicated", "--max-seq-length", "256"]
    arguments += ["--teacher", f"elsewhere={vllm_tiny.url}/v1#tiny"]
    async with (
        running_backend(tmp_path / "state", *arguments) as backend,
        backend.client() as client,
        aiohttp.ClientSession() as http,
    ):
        records = RecordStore(f"sqlite:///{tmp_path / 'state' / 'calls.db'}")
        world = World(backend, client, http, records)
        try:
            await sft(world)
            await dpo(world)
            await distil_from_a_closed_run(world)
            await distil_from_another_server(world)
            the_key_stays_with_the_supervisor(backend)
        finally:
            records.close()


class World:
    """A backend, and what its engine makes of recorded calls."""

    def __init__(
        self, backend: Backend, client: InsituClient, http: aiohttp.ClientSession, records: RecordStore
    ) -> None:
        self.backend, self.client, self.http, self.records = backend, client, http, records
        self.engine = backend.engine_client(http)

    async def register(self, run: str, rank: int) -> None:
        await self.client.register_run(run, "tiny", lora=LoraSettings(rank=rank, alpha=32))
        await self.client.wait_run_ready(run, 400)

    async def group(self, run: str, rewards: list[float]) -> TrajectoryGroup:
        """Rollouts of one question with the given rewards."""
        rollouts = Rollouts(self.http, self.backend.gateway_url, run, max_tokens=12, attempts=1)
        asked = [{"role": "user", "content": "Say something."}]
        ids = [uuid.uuid4().hex for _ in rewards]
        said = await asyncio.gather(*[rollouts.chat(rollout, asked) for rollout in ids])
        rated = [Trajectory(r, [c], w) for r, (_, c), w in zip(ids, said, rewards, strict=True)]
        return TrajectoryGroup(uuid.uuid4().hex, run, rated)

    def calls(self, group: TrajectoryGroup) -> list[ModelCall]:
        return self.records.get([trajectory.call_ids[0] for trajectory in group.trajectories])

    async def scores(self, model: str, calls: list[ModelCall]) -> list[float]:
        """The engine's log-probability of each answer."""
        every = await self.engine.score(model, [call.prompt_ids + call.output_ids for call in calls])
        return [sum(one[len(call.prompt_ids) - 1 :]) for one, call in zip(every, calls, strict=True)]

    async def train(self, group: TrajectoryGroup, settings: StepSettings) -> JobInfo:
        job = await train(self.client, [group], settings, 120)
        assert job.metrics["updated"] == 1
        assert job.metrics["account/trajectories"] == len(group.trajectories)
        return job


async def sft(world: World) -> None:
    await world.register("student", 8)
    group = await world.group("student", [1.0, 0.0, 1.0])
    settings = StepSettings(method="sft", learning_rate=FAST, min_reward=0.5, mask_truncated=False)
    job = await world.train(group, settings)
    assert (job.metrics["account/trained"], job.metrics["account/below_min_reward"]) == (2, 1)
    good = [world.calls(group)[place] for place in (0, 2)]
    before, after = await world.scores("tiny", good), await world.scores("student@1", good)
    assert all(new > old for old, new in zip(before, after, strict=True)), (before, after)
    num_tokens = sum(len(call.output_ids) for call in good)
    assert job.metrics["loss"] == pytest.approx(-sum(before) / num_tokens, rel=1e-3)


async def dpo(world: World) -> None:
    group = await world.group("student", [0.2, 0.9, 0.5, 0.1])
    settings = StepSettings(method="dpo", learning_rate=FAST, reference_step=1, mask_truncated=False)
    job = await world.train(group, settings)
    assert (job.metrics["account/trained"], job.metrics["account/not_in_pair"]) == (2, 2)
    assert job.metrics["dpo/margin"] == pytest.approx(0.0, abs=1e-4), "the policy is the reference"
    assert job.metrics["loss"] == pytest.approx(0.6931, abs=1e-3)
    _, best, _, worst = world.calls(group)
    margins: list[float] = []
    for model in ("student@1", "student@2"):
        chosen, rejected = await world.scores(model, [best, worst])
        margins.append(chosen - rejected)
    assert margins[1] > margins[0] + 0.1


async def distil_from_a_closed_run(world: World) -> None:
    """A teacher of another rank, whose run is over."""
    await world.client.close_run("student")
    await world.register("pupil", 4)
    group = await world.group("pupil", [0.0, 0.0, 0.0, 0.0])
    settings = StepSettings(method="distill", learning_rate=FAST, teacher="student@2")
    with pytest.raises(NotFound, match="student@7 is not kept"):
        await train(world.client, [group], StepSettings(method="distill", teacher="student@7"))
    job = await world.train(group, settings)
    assert job.metrics["kl/teacher"] > 0.001
    assert job.metrics["account/trained"] == 4


async def distil_from_another_server(world: World) -> None:
    group = await world.group("pupil", [0.0])
    settings = StepSettings(method="distill", learning_rate=FAST, teacher="elsewhere")
    with pytest.raises(CannotHonour, match="no teacher 'nobody' here"):
        await train(world.client, [group], StepSettings(method="distill", teacher="nobody"))
    job = await world.train(group, settings)
    (call,) = world.calls(group)
    (own,), (base,) = await world.scores("pupil@1", [call]), await world.scores("tiny", [call])
    assert abs(own - base) > 1e-3, "the teacher is not the pupil"
    assert job.metrics["kl/teacher"] > 0
    assert job.metrics["mismatch/mean_abs"] < 1e-2
    assert (job.step, job.metrics["time/teacher_seconds"] > 0) == (2, True)


def the_key_stays_with_the_supervisor(backend: Backend) -> None:
    assert backend.process is not None
    children = [process for process in backend.descendants() if process.pid != backend.process.pid]
    assert children
    assert not [process for process in children if TEACHER_KEY in str(process.environ())]
    logs = [backend.output, *(backend.state_dir / "logs").iterdir()]
    assert not [log.name for log in logs if TEACHER_KEY in log.read_text(errors="replace")]
