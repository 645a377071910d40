"""An agent of Google ADK."""

from __future__ import annotations

from typing import Any

from google.adk.agents import LlmAgent, RunConfig
from google.adk.runners import InMemoryRunner
from google.genai import types


def measure(thing: str) -> str:
    """Measures a thing."""
    return thing.replace("thing-", "measured-")


async def agent(question: str, context: Any) -> str:
    measurer = LlmAgent(
        name="measurer",
        model=context.client("google_adk"),
        instruction="You measure things with the tool.",
        tools=[measure],
    )
    runner = InMemoryRunner(measurer, app_name="measuring")
    session = await runner.session_service.create_session(app_name="measuring", user_id="user")
    message = types.Content(role="user", parts=[types.Part(text=question)])
    answer = ""
    async for event in runner.run_async(
        user_id="user", session_id=session.id, new_message=message, run_config=RunConfig(max_llm_calls=4)
    ):
        if event.is_final_response() and event.content and event.content.parts:
            answer = "".join(part.text or "" for part in event.content.parts)
    return answer
