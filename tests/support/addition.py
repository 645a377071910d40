"""Single-digit addition: the task of the end-to-end tests and of the step benchmark."""

from __future__ import annotations

import asyncio
import random
import re
import uuid
from dataclasses import dataclass

import aiohttp

from insitu.client import InsituClient, JobInfo
from insitu.types import StepSettings, Trajectory, TrajectoryGroup

MAX_TOKENS = 12


def question(generator: random.Random) -> tuple[str, str]:
    a, b = generator.randint(1, 9), generator.randint(1, 9)
    return f"What is {a} + {b}? Reply with the number only.", str(a + b)


def reward(text: str, answer: str) -> float:
    """1 for the number alone, 0.3 for a wrong number alone, 0.1 for the number somewhere in the text."""
    said = text.strip().rstrip(".")
    if said == answer:
        return 1.0
    if said.isdigit():
        return 0.3
    return 0.1 if answer in re.findall(r"\d+", text) else 0.0


@dataclass(frozen=True)
class Said:
    """What the model answered in one call."""

    text: str
    call_id: str
    truncated: bool


@dataclass
class Rollouts:
    """Samples answers through the gateway as any OpenAI client would, with retries across restarts."""

    http: aiohttp.ClientSession
    gateway_url: str
    run: str
    key: str = "default"
    max_tokens: int = MAX_TOKENS
    attempts: int = 60

    async def chat(self, rollout_id: str, messages: list[dict[str, str]], model: str = "") -> tuple[str, str]:
        """One call; returns the text and the id of the recorded call."""
        said = await self.say(rollout_id, messages, model)
        return said.text, said.call_id

    async def say(self, rollout_id: str, messages: list[dict[str, str]], model: str = "") -> Said:
        """One call, with how it ended."""
        body = {"model": model or self.run, "messages": messages, "max_tokens": self.max_tokens}
        url = f"{self.gateway_url}/rollouts/{rollout_id}/v1/chat/completions"
        headers = {"Authorization": f"Bearer {self.key}"}
        last = ""
        for _ in range(self.attempts):
            try:
                async with self.http.post(url, json=body, headers=headers) as answer:
                    if answer.status == 200:
                        choice = (await answer.json())["choices"][0]
                        text, call_id = choice["message"]["content"] or "", answer.headers["x-insitu-call-id"]
                        return Said(text, call_id, choice["finish_reason"] == "length")
                    last = f"{answer.status}: {await answer.text()}"
                    assert answer.status >= 429, last
            except aiohttp.ClientError as error:
                last = repr(error)
            await asyncio.sleep(1.0)
        raise AssertionError(f"no answer after {self.attempts} attempts, last: {last}")

    async def group(self, asked: str, answer: str, size: int) -> TrajectoryGroup:
        trajectories = await asyncio.gather(*[self._one(asked, answer) for _ in range(size)])
        return TrajectoryGroup(uuid.uuid4().hex, self.run, list(trajectories))

    async def _one(self, asked: str, answer: str) -> Trajectory:
        rollout_id = uuid.uuid4().hex
        text, call_id = await self.chat(rollout_id, [{"role": "user", "content": asked}])
        return Trajectory(rollout_id, [call_id], reward(text, answer))


async def sample_groups(rollouts: Rollouts, tasks: list[tuple[str, str]], size: int) -> list[TrajectoryGroup]:
    return list(await asyncio.gather(*[rollouts.group(asked, answer, size) for asked, answer in tasks]))


def spread_rewards(group: TrajectoryGroup) -> TrajectoryGroup:
    """The group with random rewards, the same for the same id: equal ones would teach nothing."""
    generator = random.Random(group.id)
    rated = [Trajectory(t.rollout_id, t.call_ids, generator.random()) for t in group.trajectories]
    return TrajectoryGroup(group.id, group.run, rated)


def mean_reward(groups: list[TrajectoryGroup]) -> float:
    rewards = [trajectory.reward for group in groups for trajectory in group.trajectories]
    return sum(rewards) / len(rewards)


async def random_group(rollouts: Rollouts) -> TrajectoryGroup:
    """A random model says nothing sensible: random rewards move its weights well enough."""
    asked = [{"role": "user", "content": "Say something."}]
    ids = [uuid.uuid4().hex for _ in range(4)]
    made = await asyncio.gather(*[rollouts.chat(rollout, asked) for rollout in ids])
    rated = [Trajectory(r, [call_id], random.random()) for r, (_, call_id) in zip(ids, made, strict=True)]
    return TrajectoryGroup(uuid.uuid4().hex, rollouts.run, rated)


async def train(
    client: InsituClient, groups: list[TrajectoryGroup], settings: StepSettings, deadline_seconds: float = 600
) -> JobInfo:
    """Upload the groups one by one, ask for a step, wait for its end."""
    await asyncio.gather(*[client.put_group(group) for group in groups])
    ids = [group.id for group in groups]
    job = await client.submit_step(groups[0].run, ids, settings, idempotency_key=uuid.uuid4().hex)
    return await client.wait_job(job.id, deadline_seconds)
