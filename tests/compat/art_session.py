"""What a program written for ART does, from registration to deleted checkpoints; prints what it saw as JSON.

Runs in an environment of its own, with the remote backend of the NeMo Agent Toolkit (ART 0.5.17, whose
models train themselves) or with `InsituBackend` (0.5.18, whose backends train models):

    python tests/compat/art_session.py remote|insitu URL KEY --name RUN [--lose-answer]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

import art  # pyright: ignore[reportMissingImports]

NUM_STEPS = 3
GROUP_SIZE = 4
QUESTIONS = ("What is 3 + 4?", "What is 2 + 2?")


def make_backend(kind: str, url: str, key: str) -> Any:
    if kind == "insitu":
        from insitu.compat.art import InsituBackend

        return InsituBackend(url, key)
    from nat.plugins.openpipe.remote_backend import RemoteBackend  # pyright: ignore[reportMissingImports]

    return RemoteBackend(f"http://art:{key}@{urlsplit(url).netloc}")


async def rollout(model: Any, question: str, dice: random.Random) -> Any:
    """A conversation of two turns; a further history stands for a sub-agent."""
    trajectory = art.Trajectory(messages_and_choices=[{"role": "user", "content": question}])
    for _ in range(2):
        trajectory.messages_and_choices.append(await ask(model, trajectory.messages()))
        trajectory.messages_and_choices.append({"role": "user", "content": f"Sure? {dice.random()}"})
    aside = art.trajectories.History(messages_and_choices=[{"role": "user", "content": "Check it."}])
    aside.messages_and_choices.append(await ask(model, aside.messages()))
    trajectory.additional_histories.append(aside)
    trajectory.reward = dice.random()
    return trajectory.finish()


async def ask(model: Any, messages: list[Any]) -> Any:
    # Without a step the toolkit's remote backend says `name@0` for ever, the untrained model.
    name = model.get_inference_name(await model.get_step())
    answer = await model.openai_client().chat.completions.create(
        model=name, messages=messages, max_tokens=8, temperature=1.0, logprobs=True
    )
    return answer.choices[0]


async def train(kind: str, backend: Any, model: Any, groups: list[Any]) -> dict[str, float]:
    """One step, as users of that release write it."""
    if kind == "insitu":
        result = await backend.train(model, groups, learning_rate=1e-3)
        await model.log(groups, metrics=result.metrics, step=result.step, split="train")
        return result.metrics
    await model.train(groups, config=art.TrainConfig(learning_rate=1e-3))
    return {}


async def session(arguments: argparse.Namespace) -> dict[str, Any]:
    kind, dice = arguments.kind, random.Random(0)
    backend = make_backend(kind, arguments.url, arguments.key)
    model = art.TrainableModel(name=arguments.name, project="compat", base_model=arguments.base_model)
    await model.register(backend)
    seen: dict[str, Any] = {"art": version("openpipe-art"), "steps": [await model.get_step()], "rewards": []}
    seen |= {"names": [model.get_inference_name()], "metrics": [], "lost": 0}
    for _ in range(NUM_STEPS):
        groups = await art.gather_trajectory_groups(
            art.TrajectoryGroup(rollout(model, question, dice) for _ in range(GROUP_SIZE))
            for question in QUESTIONS
        )
        if arguments.lose_answer:
            try:
                await asyncio.wait_for(train(kind, backend, model, groups), 1.0)
            except TimeoutError:
                seen["lost"] += 1
        seen["metrics"].append(await train(kind, backend, model, groups))
        seen["steps"].append(await model.get_step())
        seen["names"].append(model.get_inference_name())
        rewards = [t.reward for group in groups for t in group.trajectories]
        seen["rewards"].append(sum(rewards) / len(rewards))
    await model.delete_checkpoints()
    await backend.close()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["remote", "insitu"])
    parser.add_argument("url")
    parser.add_argument("key")
    parser.add_argument("--name", required=True)
    parser.add_argument("--base-model", default="tiny")
    parser.add_argument(
        "--lose-answer", action="store_true", help="give up on each step once, then ask again"
    )
    print(json.dumps(asyncio.run(session(parser.parse_args()))))


if __name__ == "__main__":
    main()
