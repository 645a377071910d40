"""Reward by a model that judges each output on its own."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from insitu.json_values import JsonValue
from insitu.plugins import Kind, Parts, register
from insitu.rewards.evaluator import Evaluator
from insitu.rewards.items import EvalItem, EvalResult
from insitu.rewards.judges.judge_model import JudgeModel
from insitu.rewards.judges.judge_prompt import (
    BadAnswer,
    JudgeConfig,
    ask_judge,
    judge_messages,
    read_json_answer,
    read_score,
)

_FORM = '{"reasoning": "<why, in a sentence or two>", "score": <number>}'
_PROMPT = """How well does the output answer the input? Compare it with what is expected, if that is given.

{input}

{expected}

{output}"""


class LlmJudgeConfig(JudgeConfig):
    """The judge and its prompt, in which `{input}`, `{expected}` and `{output}` stand for the item's."""

    prompt: str = _PROMPT
    """The prompt of the judge, with `{input}`, `{expected}` and `{output}`."""

    @model_validator(mode="after")
    def _shows_the_output(self) -> Self:
        if "{output}" not in self.prompt:
            raise ValueError("the prompt must contain {output}")
        return self


@register(Kind.EVALUATOR, "llm_judge", LlmJudgeConfig)
class LlmJudge(Evaluator):
    """The judge's score, on its own scale."""

    def __init__(self, config: LlmJudgeConfig, parts: Parts) -> None:
        self._config = config
        self._model = JudgeModel(config.llm, parts.llm(config.llm))

    async def evaluate_item(self, item: EvalItem) -> EvalResult:
        """Score the item; two unreadable answers, or a score off the scale, are an error."""
        data = {"input": item.input, "expected": item.expected, "output": item.output}
        messages = judge_messages(self._config, _FORM, data)
        score, reasoning = await ask_judge(self._model.ask, messages, self._read)
        return EvalResult(item.id, score, reasoning)

    async def aclose(self) -> None:
        """Close the connections to the judge."""
        await self._model.aclose()

    def _read(self, answer: str) -> tuple[float, JsonValue]:
        found = read_json_answer(answer)
        if not isinstance(found, dict) or "score" not in found:
            raise BadAnswer(f"it is not an object with a score: {answer[:100]!r}")
        return read_score(self._config, found["score"]), found.get("reasoning")
