"""A shop's till with the OpenAI Agents SDK."""

from __future__ import annotations

from agents import Agent, Model, RunConfig, Runner

from insitu import WorkflowContext

INSTRUCTIONS = "You are the till of a shop. Reply with the total price in euros, the number only."


async def run(question: str, context: WorkflowContext) -> str:
    """Return the model's answer to an order."""
    model: Model = context.client("openai_agents")  # at the address of this rollout
    till = Agent(name="till", instructions=INSTRUCTIONS, model=model)
    # With tracing the SDK sends every run to OpenAI.
    result = await Runner.run(till, question, run_config=RunConfig(tracing_disabled=True))
    return str(result.final_output)
