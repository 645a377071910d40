"""A shop's till with the OpenAI SDK: one order, one model call."""

from __future__ import annotations

from openai import AsyncOpenAI

from insitu import WorkflowContext

INSTRUCTIONS = "You are the till of a shop. Reply with the total price in euros, the number only."


async def run(question: str, context: WorkflowContext) -> str:
    """Return the model's answer to an order."""
    client: AsyncOpenAI = context.client("openai")  # at the address of this rollout
    reply = await client.chat.completions.create(
        model=context.llm().model,
        messages=[
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": question},
        ],
    )
    return reply.choices[0].message.content or ""
