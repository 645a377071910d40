"""An agent of Pydantic AI."""

from __future__ import annotations

from typing import Any

from pydantic_ai import Agent, UsageLimits


def measure(thing: str) -> str:
    """Measures a thing."""
    return thing.replace("thing-", "measured-")


async def agent(question: str, context: Any) -> str:
    measurer = Agent(
        context.client("pydantic_ai"), instructions="You measure things with the tool.", tools=[measure]
    )
    result = await measurer.run(question, usage_limits=UsageLimits(request_limit=4))
    return result.output
