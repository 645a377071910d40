"""An agent of Strands; its answers are streamed."""

from __future__ import annotations

from typing import Any

from strands import Agent, tool


@tool
def measure(thing: str) -> str:
    """Measures a thing."""
    return thing.replace("thing-", "measured-")


def make_agent(context: Any) -> Agent:
    return Agent(
        model=context.client("strands"),
        tools=[measure],
        system_prompt="You measure things with the tool.",
        callback_handler=None,
    )


async def agent(question: str, context: Any) -> str:
    return str(await make_agent(context).invoke_async(question))


def blocking_agent(question: str, context: Any) -> str:
    return str(make_agent(context)(question))
