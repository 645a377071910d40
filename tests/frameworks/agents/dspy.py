"""A ReAct module of DSPy."""

from __future__ import annotations

import dspy

import insitu


def measure(thing: str) -> str:
    """Measures a thing."""
    return thing.replace("thing-", "measured-")


async def agent(question: str) -> str:
    lm = insitu.current_rollout().client("dspy")  # made in the function that its calls belong to
    signature = dspy.Signature("question -> answer", "You measure things with the tool.")
    with dspy.context(lm=lm):
        prediction = await dspy.ReAct(signature, tools=[measure], max_iters=3).acall(question=question)
    return prediction.answer
