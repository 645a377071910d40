"""The workflow and reward of `tests/compat/nat_addition` (NeMo Agent Toolkit) as plain functions."""

from __future__ import annotations

import re

from insitu import EvalItem, WorkflowContext


async def addition(question: str, context: WorkflowContext) -> str:
    """Answer like the toolkit's registered function; the LLM comes from the rollout, not the builder."""
    llm = context.client("langchain")
    return str((await llm.ainvoke([("user", question)])).content)


def addition_reward(item: EvalItem) -> float:
    """Score like the toolkit's `evaluate_item`; return only the score."""
    text, wanted = str(item.output).strip(), str(item.expected)
    if text == wanted:
        score = 1.0
    elif re.fullmatch(r"\d+", text):
        score = 0.3
    else:
        score = 0.1 if re.search(rf"\b{wanted}\b", text) else 0.0
    return score + 0.01 / (1 + len(text))
