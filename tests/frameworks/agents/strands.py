"""An agent of Strands; its answers are streamed."""

from __future__ import annotations

from typing import Any

from strands import Agent, tool


@tool
def measure(thing: str) -> str:
    """Measures a thing."""
    return thing.replace("thing-", "measured-")


async def agent(question: str, context: Any) -> str:
    measurer = Agent(
        model=context.client("strands"),
        tools=[measure],
        system_prompt="You measure things with the tool.",
        callback_handler=None,
    )
    return str(await measurer.invoke_async(question))
