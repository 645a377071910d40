"""An agent that adds: one question, one model call."""

from __future__ import annotations

from openai import AsyncOpenAI

from insitu import WorkflowContext

CLIENT = AsyncOpenAI(api_key="set for each rollout")


async def answer(question: str, context: WorkflowContext) -> str:
    """Return the model's reply. `context.llm()` is the model in training, at the rollout's own address."""
    llm = context.llm()
    client = CLIENT.with_options(base_url=llm.base_url, api_key=llm.api_key)
    reply = await client.chat.completions.create(
        messages=[{"role": "user", "content": question}], **llm.call_args()
    )
    return reply.choices[0].message.content or ""
