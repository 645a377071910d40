"""Reward by a model that sees all outputs for one example and compares them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Self

from pydantic import model_validator

from insitu.json_values import JsonObject, JsonValue, as_list, as_object
from insitu.plugins import Kind, Parts, register
from insitu.rewards.evaluator import GroupEvaluator
from insitu.rewards.items import EvalItem, EvalResult
from insitu.rewards.judges.judge_model import JudgeModel
from insitu.rewards.judges.judge_prompt import (
    BadAnswer,
    JudgeConfig,
    ScoreOutOfRange,
    ask_judge,
    judge_messages,
    read_json_answer,
    read_score,
)

_FORM = (
    '[{"index": <number of the output>, "reasoning": "<why>", "score": <number>}, ...], one entry per output'
)
_PROMPT = """Compare the outputs for this input with each other and with what is expected, if that is given. \
A better output gets a higher score; outputs that are equally good get the same score.

{input}

{expected}

{outputs}"""


class GroupJudgeConfig(JudgeConfig):
    """The judge and its prompt, in which `{input}`, `{expected}` and `{outputs}` stand for the group's."""

    prompt: str = _PROMPT
    """The prompt of the judge, with `{input}`, `{expected}` and `{outputs}`."""
    seed: int = 0
    """Determines, with the example's id, the order in which the outputs are shown."""

    @model_validator(mode="after")
    def _shows_the_outputs(self) -> Self:
        if "{outputs}" not in self.prompt:
            raise ValueError("the prompt must contain {outputs}")
        return self


@register(Kind.EVALUATOR, "group_judge", GroupJudgeConfig)
class GroupJudge(GroupEvaluator):
    """The judge's scores, on its own scale; one answer scores the whole group."""

    def __init__(self, config: GroupJudgeConfig, parts: Parts) -> None:
        self._config = config
        self._model = JudgeModel(config.llm, parts.llm(config.llm))

    async def evaluate_group(self, items: Sequence[EvalItem]) -> list[EvalResult]:
        """Return one result per item, in order; two answers that do not score each item once are an error."""
        order = list(range(len(items)))
        # Judges have a position bias; without a shuffle the same generation would always come first.
        random.Random(f"{self._config.seed}:{items[0].id}").shuffle(order)  # noqa: S311
        data = {
            "input": items[0].input,
            "expected": items[0].expected,
            "outputs": [items[at].output for at in order],
        }
        messages = judge_messages(self._config, _FORM, data)
        found = await ask_judge(self._model.ask, messages, lambda answer: self._read(answer, len(items)))
        by_item = dict(zip(order, found, strict=True))
        return [EvalResult(item.id, *by_item[at]) for at, item in enumerate(items)]

    async def aclose(self) -> None:
        """Close the connections to the judge."""
        await self._model.aclose()

    def _read(self, answer: str, count: int) -> list[tuple[float, JsonValue]]:
        """Return score and reasoning per output, in the order shown."""
        entries = _entries(answer)
        by_index = {str(entry.get("index")): entry for entry in entries}
        wanted = [str(number) for number in range(1, count + 1)]
        if len(entries) != count or by_index.keys() != set(wanted):
            indices = [entry.get("index") for entry in entries]
            raise BadAnswer(f"it must score each output from 1 to {count} once, and scores {indices}")
        try:
            return [
                (read_score(self._config, by_index[index].get("score")), by_index[index].get("reasoning"))
                for index in wanted
            ]
        except ScoreOutOfRange as error:
            raise BadAnswer(str(error)) from error


def _entries(answer: str) -> list[JsonObject]:
    found = read_json_answer(answer)
    if isinstance(found, dict):
        # Servers that force JSON often force an object.
        found = found.get("scores")
    listed = as_list(found)
    entries = [entry for each in listed or () if (entry := as_object(each)) is not None]
    if listed is None or len(entries) < len(listed):
        raise BadAnswer(f"it is not a list of objects: {answer[:100]!r}")
    return entries
