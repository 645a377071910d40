"""The whole algorithm on one page: group-relative policy optimisation against a running `insitu serve`.

    insitu serve --model "$(python -m insitu.testing.models smollm2)" --model-name smollm2 \
        --max-seq-length 256 --max-num-seqs 128
    python examples/minimal_grpo.py --steps 20

A step asks questions, samples every answer several times, scores the answers, compares each with its
siblings, and makes the tokens of the better ones likelier. This file does all of it except the gradient: it
spells out the inputs of the loss (`advantages`, `sequences`, `token_weights`, `loss`) and checks after every
step that the backend trained on exactly those. It needs only `insitu`, no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import re
import uuid
from dataclasses import dataclass
from typing import Any

import aiohttp

from insitu.client import InsituClient
from insitu.gateway_client import GatewayClient
from insitu.types import StepSettings, Trajectory, TrajectoryGroup
from insitu.wire.listed_calls import expand

NUM_QUESTIONS, GROUP_SIZE, MAX_TOKENS = 16, 8, 12


# ── the task: any agent and any reward would do ─────────────────────────────────────────────────────


def question(generator: random.Random) -> tuple[str, str]:
    a, b = generator.randint(1, 9), generator.randint(1, 9)
    return f"What is {a} + {b}? Reply with the number only.", str(a + b)


def reward(text: str, answer: str) -> float:
    """Give 1 for the number alone, 0.3 for a wrong number alone, 0.1 for the number somewhere in the text."""
    said = text.strip().rstrip(".")
    if said == answer:
        return 1.0
    if said.isdigit():
        return 0.3
    return 0.1 if answer in re.findall(r"\d+", text) else 0.0


# ── the algorithm ───────────────────────────────────────────────────────────────────────────────────


def advantages(rewards: list[float]) -> list[float]:
    """Compare each rollout with its siblings: ``A = (r - mean) / (std + 1e-6)``."""
    mean = math.fsum(rewards) / len(rewards)  # rounded once: a reward equal to the mean is exactly 0
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean) / (std + 1e-6) if std > 1e-6 else 0.0 for r in rewards]


@dataclass
class Sequence:
    """Token ids as the engine saw them; `mask` is 1 where the model sampled, `sampler` its logprob there."""

    ids: list[int]
    mask: list[int]
    sampler: list[float]


def sequences(calls: list[dict[str, Any]]) -> list[Sequence]:
    """Join a call to an earlier one only if its prompt starts with exactly the earlier tokens."""
    made: list[Sequence] = []
    for call in calls:
        prompt, output = call["prompt_ids"], call["output_ids"]
        known = [s for s in made if prompt[: len(s.ids)] == s.ids]
        if not known:
            made.append(Sequence([], [], []))
        sequence = max(known, key=lambda s: len(s.ids)) if known else made[-1]
        new = prompt[len(sequence.ids) :]
        sequence.ids += new + output
        sequence.mask += [0] * len(new) + [1] * len(output)
        sequence.sampler += [0.0] * len(new) + call["logprobs"]
    return made


def token_weights(num_tokens: list[int]) -> float:
    """Weigh every token of the step the same (DAPO); the published GRPO weighs every rollout the same."""
    return 1.0 / sum(num_tokens)


def loss(new: float, old: float, sampler: float, advantage: float) -> float:
    """Compute the loss of one sampled token, before its weight. The backend differentiates it by `new`.

    `new` is the trainer's log-probability now, `old` the one before the first update of the step (equal on
    the first pass), and `sampler` the one that the engine recorded when it drew the token. The last factor
    corrects for small numerical differences between engine and trainer.
    """
    ratio = math.exp(new - old)
    surrogate = -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    return surrogate * min(math.exp(old - sampler), 2.0)


# ── the loop ────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Loop:
    client: InsituClient
    gateway: GatewayClient
    http: aiohttp.ClientSession
    gateway_url: str
    key: str
    run: str

    async def rollout(self, asked: str, answer: str) -> Trajectory:
        """Sample one answer. The rollout's id in the address is all the gateway needs to record the call."""
        rollout_id = uuid.uuid4().hex
        url = f"{self.gateway_url}/rollouts/{rollout_id}/v1/chat/completions"
        messages = [{"role": "user", "content": asked}]
        body = {"model": self.run, "messages": messages, "max_tokens": MAX_TOKENS}
        async with self.http.post(url, json=body, headers={"Authorization": f"Bearer {self.key}"}) as got:
            got.raise_for_status()
            text = (await got.json())["choices"][0]["message"]["content"] or ""
        return Trajectory(rollout_id, [got.headers["x-insitu-call-id"]], reward(text, answer))

    async def group(self, asked: str, answer: str) -> TrajectoryGroup:
        rollouts = await asyncio.gather(*[self.rollout(asked, answer) for _ in range(GROUP_SIZE)])
        return TrajectoryGroup(uuid.uuid4().hex, self.run, list(rollouts))

    async def step(self, questions: list[tuple[str, str]], settings: StepSettings) -> dict[str, float]:
        groups = await asyncio.gather(*[self.group(*asked) for asked in questions])
        for group in groups:
            await self.client.put_group(group)
        ids = [group.id for group in groups]
        job = await self.client.submit_step(self.run, ids, settings, idempotency_key=uuid.uuid4().hex)
        job = await self.client.wait_job(job.id, 600)
        return job.metrics | await self.by_hand(list(groups))

    async def by_hand(self, groups: list[TrajectoryGroup]) -> dict[str, float]:
        """Rebuild the batch from recorded tokens: how many train, and their loss if new = old = sampler."""
        rows: list[tuple[Sequence, float]] = []
        for group in groups:
            judged = advantages([t.reward for t in group.trajectories])
            for trajectory, advantage in zip(group.trajectories, judged, strict=True):
                if any(judged):  # a group of equal rewards teaches nothing
                    calls = expand(await self.gateway.rollout_calls(trajectory.rollout_id))
                    rows += [(sequence, advantage) for sequence in sequences(calls)]
        weight = token_weights([sum(s.mask) for s, _ in rows]) if rows else 0.0
        total = sum(
            weight * loss(lp, lp, lp, advantage)
            for s, advantage in rows
            for lp, sampled in zip(s.sampler, s.mask, strict=True)
            if sampled
        )
        tokens = sum(sum(s.mask) for s, advantage in rows if advantage)
        return {"by_hand/num_tokens": float(tokens), "by_hand/loss": total}


async def main(options: argparse.Namespace) -> None:
    client, gateway = InsituClient(options.url, options.key), GatewayClient(options.gateway, options.key)
    async with client, gateway, aiohttp.ClientSession() as http:
        await client.register_run(options.run, options.model)
        await client.wait_run_ready(options.run, 300)
        loop = Loop(client, gateway, http, options.gateway, options.key, options.run)
        generator = random.Random(options.seed)  # noqa: S311 - questions, not secrets
        for number in range(1, options.steps + 1):
            questions = [question(generator) for _ in range(NUM_QUESTIONS)]
            m = await loop.step(questions, StepSettings(options.learning_rate, loss="dapo"))
            assert m["num_tokens"] == m["by_hand/num_tokens"], "the backend trained on other tokens"
            print(
                f"step {number}: reward {m['reward/mean']:.3f}, {m['num_tokens']:.0f} tokens, loss "
                f"{m['loss']:+.4f} (by hand {m['by_hand/loss']:+.4f}), mismatch {m['mismatch/mean_abs']:.3f}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO on one page, against a running `insitu serve`")
    parser.add_argument("--url", default="http://127.0.0.1:7623")
    parser.add_argument("--gateway", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="default")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--run", default="minimal")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(main(parser.parse_args()))
