"""A shop's till with LlamaIndex: a workflow of one step."""

from __future__ import annotations

from llama_index.core.llms import ChatMessage
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from llama_index.llms.openai_like import OpenAILike

from insitu import WorkflowContext

INSTRUCTIONS = "You are the till of a shop. Reply with the total price in euros, the number only."


class Till(Workflow):
    """Ask the model for the total of `event.order`, with the LLM object in `event.llm`."""

    @step
    async def ask(self, event: StartEvent) -> StopEvent:
        """Return the model's answer."""
        messages = [
            ChatMessage(role="system", content=INSTRUCTIONS),
            ChatMessage(role="user", content=event.order),
        ]
        reply = await event.llm.achat(messages)
        return StopEvent(result=reply.message.content or "")


async def run(question: str, context: WorkflowContext) -> str:
    """Return the model's answer to an order."""
    llm: OpenAILike = context.client("llama_index")  # at the address of this rollout
    return await Till(timeout=120).run(order=question, llm=llm)
