"""A crew of one agent."""

from __future__ import annotations

from typing import Any

from crewai import Agent, Crew, Task
from crewai.tools import tool


@tool("measure")
def measure(thing: str) -> str:
    """Measures a thing."""
    return thing.replace("thing-", "measured-")


def make_crew(question: str, context: Any) -> Crew:
    measurer = Agent(
        role="measurer",
        goal="You measure things with the tool.",
        backstory="You have scales.",
        llm=context.client("crewai"),
        tools=[measure],
        max_iter=3,
    )
    task = Task(description=question, expected_output="The measurement.", agent=measurer)
    return Crew(agents=[measurer], tasks=[task])


async def agent(question: str, context: Any) -> str:
    return (await make_crew(question, context).akickoff()).raw


def blocking_agent(question: str, context: Any) -> str:
    return make_crew(question, context).kickoff().raw
