"""A LangChain workflow, one with a tool, and the reward of both."""

from __future__ import annotations

import re

from nat.builder.builder import Builder, EvalBuilder
from nat.builder.evaluator import EvaluatorInfo
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_evaluator, register_function
from nat.data_models.component_ref import LLMRef
from nat.data_models.evaluator import EvalInputItem, EvaluatorBaseConfig
from nat.data_models.function import FunctionBaseConfig
from nat.plugins.eval.data_models.evaluator_io import EvalOutputItem
from nat.plugins.eval.evaluator.base_evaluator import BaseEvaluator


class AdditionConfig(FunctionBaseConfig, name="addition"):
    llm: LLMRef


@register_function(config_type=AdditionConfig, framework_wrappers=[LLMFrameworkEnum.LANGCHAIN])
async def addition(config: AdditionConfig, builder: Builder):
    llm = await builder.get_llm(config.llm, wrapper_type=LLMFrameworkEnum.LANGCHAIN)

    async def answer(question: str) -> str:
        return str((await llm.ainvoke([("user", question)])).content)

    yield FunctionInfo.from_fn(answer, description="adds two digits")


class AdditionWithToolConfig(FunctionBaseConfig, name="addition_with_tool"):
    llm: LLMRef


@register_function(config_type=AdditionWithToolConfig, framework_wrappers=[LLMFrameworkEnum.LANGCHAIN])
async def addition_with_tool(config: AdditionWithToolConfig, builder: Builder):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    llm = await builder.get_llm(config.llm, wrapper_type=LLMFrameworkEnum.LANGCHAIN)

    @tool
    def add(a: int, b: int) -> str:
        """The sum of two numbers."""
        return str(a + b)

    async def answer(question: str) -> str:
        messages = [HumanMessage(question)]
        said = await llm.bind_tools([add], tool_choice="add").ainvoke(messages)
        messages.append(said)
        for call in said.tool_calls:
            messages.append(ToolMessage(str(await add.ainvoke(call["args"])), tool_call_id=call["id"]))
        return str((await llm.ainvoke(messages)).content)

    yield FunctionInfo.from_fn(answer, description="adds two digits with a tool")


class AdditionRewardConfig(EvaluatorBaseConfig, name="addition_reward"):
    pass


class AdditionReward(BaseEvaluator):
    """1 for the exact number, 0.3 for a bare wrong one, 0.1 for the number somewhere in the text; and a
    little for short answers, so that rewards differ from the start."""

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        text, wanted = str(item.output_obj).strip(), str(item.expected_output_obj)
        if text == wanted:
            score = 1.0
        elif re.fullmatch(r"\d+", text):
            score = 0.3
        else:
            score = 0.1 if re.search(rf"\b{wanted}\b", text) else 0.0
        return EvalOutputItem(id=item.id, score=score + 0.01 / (1 + len(text)), reasoning={"text": text[:80]})


@register_evaluator(config_type=AdditionRewardConfig)
async def addition_reward(config: AdditionRewardConfig, builder: EvalBuilder):
    evaluator = AdditionReward(builder.get_max_concurrency())
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="addition")
