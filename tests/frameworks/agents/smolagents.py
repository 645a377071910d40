"""A tool-calling agent of smolagents; it blocks, so it runs in a thread."""

from __future__ import annotations

from typing import Any

from smolagents import ToolCallingAgent, tool


@tool
def measure(thing: str) -> str:
    """Measures a thing.

    Args:
        thing: what to measure
    """
    return thing.replace("thing-", "measured-")


def agent(question: str, context: Any) -> str:
    measurer = ToolCallingAgent(
        tools=[measure],
        model=context.client("smolagents"),
        instructions="You measure things with the tool.",
        max_steps=3,
        verbosity_level=0,
    )
    return str(measurer.run(question))
