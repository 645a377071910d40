"""Tasks that a small model can learn within minutes: one turn, and two turns with a tool."""

from __future__ import annotations

import asyncio
import random
import re
import uuid
from collections.abc import Awaitable, Callable

from insitu.types import Ending, Trajectory, TrajectoryGroup
from tests.support import addition
from tests.support.addition import Rollouts, Said

ITEMS = ("apple", "bread", "candle", "drum", "fork", "guitar", "hammer", "jacket", "kettle", "lamp")

Outcome = tuple[list[Said], float]
Episode = Callable[[Rollouts, str], Awaitable[Outcome]]
"""One rollout under this id: its calls and its reward."""


def addition_episode(generator: random.Random) -> Episode:
    asked, answer = addition.question(generator)

    async def episode(rollouts: Rollouts, rollout_id: str) -> Outcome:
        said = await rollouts.say(rollout_id, [{"role": "user", "content": asked}])
        return [said], addition.reward(said.text, answer)

    return episode


def prices_episode(generator: random.Random) -> Episode:
    """The model must call a tool by name and argument, and then repeat what it said.

    Reward: 0.5 for the call alone, 0.2 with other words around it, 0.05 for naming the tool; after a call,
    0.5 more for the price alone, 0.2 with other words around it.
    """
    item, price = generator.choice(ITEMS), str(generator.randint(2, 99))
    opening = [
        {"role": "user", "content": "Write the command that looks up the cup."},
        {"role": "assistant", "content": "price(cup)"},
        {"role": "user", "content": f"Write the command that looks up the {item}."},
    ]

    async def episode(rollouts: Rollouts, rollout_id: str) -> Outcome:
        messages = list(opening)
        call = await rollouts.say(rollout_id, messages)
        if f"price({item})" not in call.text:
            return [call], 0.05 if "price" in call.text else 0.0
        earned = 0.5 if call.text.strip() == f"price({item})" else 0.2
        messages.append({"role": "assistant", "content": call.text})
        messages.append({"role": "user", "content": f"Result: {price}. Reply with the number only."})
        told = await rollouts.say(rollout_id, messages)
        if told.text.strip().rstrip(".") == price:
            return [call, told], earned + 0.5
        return [call, told], earned + (0.2 if price in re.findall(r"\d+", told.text) else 0.0)

    return episode


TASKS: dict[str, Callable[[random.Random], Episode]] = {
    "addition": addition_episode,
    "prices": prices_episode,
}


async def one_rollout(rollouts: Rollouts, episode: Episode) -> Trajectory:
    rollout_id = uuid.uuid4().hex
    calls, reward = await episode(rollouts, rollout_id)
    ending = Ending.LENGTH if calls[-1].truncated else Ending.COMPLETED
    return Trajectory(rollout_id, [call.call_id for call in calls], reward, ending)


async def one_group(rollouts: Rollouts, episode: Episode, size: int) -> TrajectoryGroup:
    rated = await asyncio.gather(*[one_rollout(rollouts, episode) for _ in range(size)])
    return TrajectoryGroup(uuid.uuid4().hex, rollouts.run, list(rated))


async def groups_of(
    rollouts: Rollouts, task: str, generator: random.Random, num_groups: int, size: int
) -> list[TrajectoryGroup]:
    """The rated rollouts of one step."""
    episodes = [TASKS[task](generator) for _ in range(num_groups)]
    return list(await asyncio.gather(*[one_group(rollouts, episode, size) for episode in episodes]))
