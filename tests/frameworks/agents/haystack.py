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


def make_agent(context: Any) -> Agent:
    return Agent(
        chat_generator=context.client("haystack"),
        tools=[measure],
        system_prompt="You measure things with the tool.",
        max_agent_steps=3,
    )


async def agent(question: str, context: Any) -> str:
    result = await make_agent(context).run_async(messages=[ChatMessage.from_user(question)])
    return result["last_message"].text or ""


def blocking_agent(question: str, context: Any) -> str:
    result = make_agent(context).run(messages=[ChatMessage.from_user(question)])
    return result["last_message"].text or ""
