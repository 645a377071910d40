"""Conversation: messages so far, and who answers them."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from openai import AsyncOpenAI

from insitu import WorkflowContext

Message = dict[str, str]
Ask = Callable[[Sequence[Message]], Awaitable[str]]
"""Return the next reply to a conversation."""
Row = dict[str, Any]
Item = TypeVar("Item")

CLIENT = AsyncOpenAI(api_key="set for each rollout")


def model(context: WorkflowContext) -> Ask:
    """Return the model in training, at the rollout's own address."""
    llm = context.llm()
    client = CLIENT.with_options(base_url=llm.base_url, api_key=llm.api_key)

    async def ask(messages: Sequence[Message]) -> str:
        reply = await client.chat.completions.create(messages=list(messages), **llm.call_args())
        return reply.choices[0].message.content or ""

    return ask


class Conversation:
    """A conversation that grows: what was said stays in the prompt of every later turn."""

    def __init__(self, ask: Ask, rules: str, examples: Sequence[tuple[str, str]] = ()) -> None:
        self._ask = ask
        self.messages: list[Message] = [{"role": "system", "content": rules}]
        for asked, answered in examples:
            self._add(asked, answered)

    async def say(self, text: str) -> str:
        """Say this to the model and return its reply without surrounding space."""
        reply = await self._ask([*self.messages, {"role": "user", "content": text}])
        self._add(text, reply)
        return reply.strip()

    def _add(self, asked: str, answered: str) -> None:
        self.messages.append({"role": "user", "content": asked})
        self.messages.append({"role": "assistant", "content": answered})


def halves(everything: Sequence[Item], seed: int, num_held_out: int) -> dict[str, list[Item]]:
    """Split into examples to train on and held-out ones; no example is in both."""
    shuffled = random.Random(seed).sample(list(everything), len(everything))
    return {"train": shuffled[num_held_out:], "held_out": shuffled[:num_held_out]}
