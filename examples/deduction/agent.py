"""An agent that solves a puzzle: one question, one call, with or without room to think."""

from __future__ import annotations

from openai import AsyncOpenAI

from insitu import WorkflowContext

SHORT = "Solve the puzzle. Reply with the answer only, separated by commas."
THINKING = (
    "Solve the puzzle. Think step by step, then end with one line `Answer: ` and the answer, "
    "separated by commas."
)
PUZZLE = """Zoe and Tom were each in a different room (barn, tower), at a different hour (1, 2).
- Zoe was not in the barn.
- Zoe came before Tom.
Who was in the tower, and when?"""
EXAMPLE = ({"role": "user", "content": PUZZLE}, {"role": "assistant", "content": "Zoe, 1"})
"""So that a small model sees the form; one that thinks finds its own."""


async def answer(question: str, context: WorkflowContext, think: bool = False) -> str:
    """Return the model's reply."""
    client: AsyncOpenAI = context.client("openai")
    first = [{"role": "system", "content": THINKING if think else SHORT}, *(() if think else EXAMPLE)]
    reply = await client.chat.completions.create(
        model=context.llm().model, messages=[*first, {"role": "user", "content": question}]
    )
    return reply.choices[0].message.content or ""
