"""A ReAct module of DSPy."""

from __future__ import annotations

from typing import Any

import dspy


def measure(thing: str) -> str:
    """Measures a thing."""
    return thing.replace("thing-", "measured-")


async def agent(question: str, context: Any) -> str:
    signature = dspy.Signature("question -> answer", "You measure things with the tool.")
    with dspy.context(lm=context.client("dspy")):
        prediction = await dspy.ReAct(signature, tools=[measure], max_iters=3).acall(question=question)
    return prediction.answer
