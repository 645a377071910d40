"""An agent of Haystack."""

from __future__ import annotations

from typing import Annotated, Any

from haystack.components.agents import Agent
from haystack.dataclasses import ChatMessage
from haystack.tools import tool


@tool
def measure(thing: Annotated[str, "what to measure"]) -> str:
    """Measures a thing."""
    return thing.replace("thing-", "measured-")


async def agent(question: str, context: Any) -> str:
    measurer = Agent(
        chat_generator=context.client("haystack"),
        tools=[measure],
        system_prompt="You measure things with the tool.",
        max_agent_steps=3,
    )
    result = await measurer.run_async(messages=[ChatMessage.from_user(question)])
    return result["last_message"].text or ""
