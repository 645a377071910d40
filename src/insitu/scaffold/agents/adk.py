"""A shop's till with Google's ADK."""

from __future__ import annotations

from google.adk.agents import LlmAgent
from google.adk.models.anthropic_llm import AnthropicLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

from insitu import WorkflowContext

INSTRUCTIONS = "You are the till of a shop. Reply with the total price in euros, the number only."
APP, USER = "shop", "customer"


async def run(question: str, context: WorkflowContext) -> str:
    """Return the model's answer to an order."""
    model: AnthropicLlm = context.client("google_adk")  # at the address of this rollout
    runner = InMemoryRunner(LlmAgent(name="till", model=model, instruction=INSTRUCTIONS), app_name=APP)
    session = await runner.session_service.create_session(app_name=APP, user_id=USER)
    order = types.Content(role="user", parts=[types.Part(text=question)])
    answer = ""
    async for event in runner.run_async(user_id=USER, session_id=session.id, new_message=order):
        if event.is_final_response() and event.content and event.content.parts:
            answer = "".join(part.text or "" for part in event.content.parts)
    return answer
