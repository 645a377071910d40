"""Workflow and reward of `tests/compat/nat_addition`, made for the NeMo Agent Toolkit, as plain functions."""

from __future__ import annotations

import re

from insitu import EvalItem, WorkflowContext


async def addition(question: str, context: WorkflowContext) -> str:
    """What was inside of `@register_function`; the LLM comes from the rollout instead of the builder."""
    llm = context.client("langchain")
    return str((await llm.ainvoke([("user", question)])).content)


def addition_reward(item: EvalItem) -> float:
    """What was `evaluate_item`; the score is all that is returned."""
    text, wanted = str(item.output).strip(), str(item.expected)
    if text == wanted:
        score = 1.0
    elif re.fullmatch(r"\d+", text):
        score = 0.3
    else:
        score = 0.1 if re.search(rf"\b{wanted}\b", text) else 0.0
    return score + 0.01 / (1 + len(text))
