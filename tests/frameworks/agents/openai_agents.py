"""An agent of the OpenAI Agents SDK."""

from __future__ import annotations

from typing import Any

from agents import Agent, RunConfig, Runner, function_tool


@function_tool
def measure(thing: str) -> str:
    """Measures a thing."""
    return thing.replace("thing-", "measured-")


async def agent(question: str, context: Any) -> str:
    return await ask(question, context.client("openai_agents"))


async def responses_agent(question: str, context: Any) -> str:
    """The same over the Responses API."""
    return await ask(question, context.client("openai_agents", responses=True))


async def ask(question: str, model: Any) -> str:
    measurer = Agent(
        name="measurer", instructions="You measure things with the tool.", model=model, tools=[measure]
    )
    result = await Runner.run(measurer, question, max_turns=3, run_config=RunConfig(tracing_disabled=True))
    return result.final_output
