"""A function-calling agent of LlamaIndex."""

from __future__ import annotations

from typing import Any

from llama_index.core.agent.workflow import FunctionAgent


def measure(thing: str) -> str:
    """Measures a thing."""
    return thing.replace("thing-", "measured-")


async def agent(question: str, context: Any) -> str:
    measurer = FunctionAgent(
        llm=context.client("llama_index"), tools=[measure], system_prompt="You measure things with the tool."
    )
    return str(await measurer.run(question, max_iterations=4))
