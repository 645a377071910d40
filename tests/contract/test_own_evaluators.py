"""Every evaluator of this project against its contract."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from insitu.plugins import Kind
from insitu.rewards.items import EvalItem
from insitu.testing.contracts import EvaluatorContract, GroupEvaluatorContract
from insitu.testing.standin_gateway import StandinGateway
from insitu.testing.standins import StandinParts, built
from insitu.workflow.llm import LLMSettings


class _Own(EvaluatorContract):
    type_name: str
    fields: ClassVar[dict[str, Any]] = {}

    def make(self) -> Any:
        return built(Kind.EVALUATOR, self.type_name, StandinParts(self.directory), **self.fields)

    def unscorable(self) -> EvalItem | None:
        return replace(self.item(), expected=None)


class TestExactMatch(_Own):
    type_name = "exact_match"


class TestRegexMatch(_Own):
    type_name = "regex_match"
    fields: ClassVar[dict[str, Any]] = {"pattern": r"\w+", "compare": "equals_expected"}


class TestNumeric(_Own):
    type_name = "numeric"

    def item(self) -> EvalItem:
        return replace(super().item(), expected="12", output="it is 12")


class TestJsonSchema(_Own):
    type_name = "json_schema"

    @pytest.fixture(autouse=True)
    def _little_patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("insitu.rewards.json_schema._PATTERN_SECONDS", 0.1)

    fields: ClassVar[dict[str, Any]] = {
        "schema": {"type": "object", "properties": {"a": {"pattern": "^(a|aa)+$"}}}
    }

    def item(self) -> EvalItem:
        return replace(super().item(), output='{"a": "a"}')

    def unscorable(self) -> EvalItem:
        return replace(self.item(), output=json.dumps({"a": "a" * 64 + "b"}))


def function_reward(item: EvalItem) -> float:
    return 1.0 / len(item.expected)


class TestPythonFunction(_Own):
    type_name = "python"
    fields: ClassVar[dict[str, Any]] = {"entry": f"{__name__}:function_reward"}


class TestWeighted(EvaluatorContract):
    @asynccontextmanager
    async def make(self) -> AsyncIterator[Any]:
        parts = StandinParts(self.directory)
        async with built(Kind.EVALUATOR, "exact_match", parts) as exact:
            members = StandinParts(self.directory, evaluators={"exact": exact, "other": exact})
            weights = {"exact": 1.0, "other": 0.5}
            async with built(Kind.EVALUATOR, "weighted", members, evaluators=weights) as weighted:
                yield weighted

    def unscorable(self) -> EvalItem | None:
        return replace(self.item(), expected=None)


def _judged(text: str) -> float:
    return 1.0 if text.strip() == "answer" else 0.25 if "answer" in text else 0.0


class TestLlmJudge(EvaluatorContract):
    @asynccontextmanager
    async def make(self) -> AsyncIterator[Any]:
        async with (
            _judge(self._reply) as parts,
            built(Kind.EVALUATOR, "llm_judge", parts, llm="judge") as evaluator,
        ):
            yield evaluator

    def unscorable(self) -> EvalItem:
        return replace(self.item(), output="no JSON, please")

    def _reply(self, rollout_id: str | None, body: Mapping[str, Any]) -> str:
        (text,) = re.findall(r"<<<OUTPUT \w+>>>\n(.*?)\n<<<END", body["messages"][1]["content"], re.DOTALL)
        return "well" if "no JSON" in text else json.dumps({"reasoning": "so", "score": _judged(text)})


class TestGroupJudge(GroupEvaluatorContract):
    @asynccontextmanager
    async def make(self) -> AsyncIterator[Any]:
        async with (
            _judge(self._reply) as parts,
            built(Kind.EVALUATOR, "group_judge", parts, llm="judge") as evaluator,
        ):
            yield evaluator

    def unscorable(self) -> list[EvalItem]:
        return [replace(each, output="no JSON, please") for each in self.group()]

    def _reply(self, rollout_id: str | None, body: Mapping[str, Any]) -> str:
        prompt = body["messages"][1]["content"]
        texts = re.findall(r"<<<OUTPUT (\d+) \w+>>>\n(.*?)\n<<<END", prompt, re.DOTALL)
        if "no JSON" in prompt:
            return "well"
        return json.dumps([{"index": int(n), "reasoning": "so", "score": _judged(text)} for n, text in texts])


class TestWeightedGroup(TestGroupJudge):
    """The weighted mean of a judge of groups and an evaluator of single rollouts."""

    @asynccontextmanager
    async def make(self) -> AsyncIterator[Any]:
        plain = StandinParts(self.directory)
        async with super().make() as judge, built(Kind.EVALUATOR, "exact_match", plain) as exact:
            members = StandinParts(self.directory, evaluators={"judge": judge, "exact": exact})
            weights = {"judge": 1.0, "exact": 1.0}
            async with built(Kind.EVALUATOR, "weighted", members, evaluators=weights) as weighted:
                yield weighted


@asynccontextmanager
async def _judge(reply: Any) -> AsyncIterator[StandinParts]:
    async with StandinGateway(reply, "judge") as server:
        llm = LLMSettings("judge", "judge", f"{server.url}/v1", "key", max_retries=0, request_timeout=5.0)
        yield StandinParts(Path(), llms={"judge": llm})
