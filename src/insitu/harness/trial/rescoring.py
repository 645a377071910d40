"""Rescoring: the reward as it is on disk now, over the recorded rollouts of one example.

It happens in a process of its own (`child`), which writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from insitu.config.load import load_config
from insitu.datasets.example import Example
from insitu.errors import InsituError, InvalidRequest
from insitu.harness.assembly import Assembly
from insitu.harness.files.redaction import Redaction
from insitu.harness.trial.child import ChildRequest, answer, ask
from insitu.rewards.calls import as_calls
from insitu.rewards.items import EvalItem, EvalResult
from insitu.rewards.score import score_group
from insitu.user_traceback import UserTraceback

# `Any` below is JSON of the user's own making: inputs, answers and messages.


class AskedRollout(BaseModel):
    """A recorded rollout, as far as a reward sees it."""

    model_config = ConfigDict(frozen=True)

    rollout_id: str
    output: Any
    calls: list[dict[str, Any]]
    """Without token ids."""
    seconds: float | None


class RescoreRequest(ChildRequest):
    """The rollouts of one example, and where its reward is configured."""

    config_file: str
    example_id: str
    input: Any
    expected: Any
    rollouts: list[AskedRollout]


class NewScore(BaseModel):
    """The reward's answer for one rollout."""

    model_config = ConfigDict(frozen=True)

    score: float | None
    call_rewards: dict[str, float] = Field(default_factory=dict)
    error: str | None = None
    frames: list[str] = Field(default_factory=list)
    """Of the user's own files, outermost first."""

    def result(self, example_id: str) -> EvalResult:
        """Return it as the evaluator's own result."""
        raised = UserTraceback("", self.error or "", self.frames) if self.frames else None
        return EvalResult(example_id, self.score, None, self.error, self.call_rewards, traceback=raised)


class RescoreAnswer(BaseModel):
    """One score per rollout, or why there are none."""

    model_config = ConfigDict(frozen=True)

    scores: list[NewScore] = Field(default_factory=list[NewScore])
    reward: str = ""
    """Its name in `eval.evaluators`."""
    note: str = ""
    """The difference from the rollouts' own scoring; empty if there is none."""
    problem: str | None = None
    hint: str = ""


def rescore(request: RescoreRequest) -> RescoreAnswer:
    """Score in a new process; raises InsituError if that fails or takes longer than `request.seconds`."""
    found = ask(
        "rescoring",
        request,
        RescoreAnswer,
        late=f"the reward gave no scores for {len(request.rollouts)} rollouts",
        by_hand="call the reward by itself, in a Python shell, to see why",
    )
    if found.problem is not None:
        raise InvalidRequest(found.problem, hint=found.hint)
    return found


async def score(request: RescoreRequest) -> RescoreAnswer:
    """Build the reward of the configuration and score the rollouts, within its own time limit."""
    async with Assembly(load_config(request.config_file)) as parts:
        config = parts.config
        evaluator = await parts.reward()
        example, note = await _example(parts, request)
        items = [_item(example, each) for each in request.rollouts]
        results = await score_group(evaluator, items, config.eval.general.evaluator_timeout_seconds)
        redaction = Redaction(config)
        name = config.finetuning.reward_function.name if config.finetuning.reward_function else ""
        return RescoreAnswer(scores=[_shown(each, redaction) for each in results], reward=name, note=note)


async def _example(parts: Assembly, request: RescoreRequest) -> tuple[Example, str]:
    """Return the example with its whole row, which rollouts do not keep; without it, say so."""
    recorded = Example(request.example_id, request.input, request.expected, {})
    try:
        examples = await parts.training_examples()
    except InsituError as error:
        return recorded, f"item.row is empty: {error.message}"
    found = next((each for each in examples if each.id == request.example_id), None)
    if found is None:
        return recorded, f"item.row is empty: the dataset has no example {request.example_id!r}"
    if json.loads(json.dumps(found.input, default=str)) != request.input:
        return recorded, "item.row is empty: the dataset has another input for this example now"
    return found, ""


def _item(example: Example, rollout: AskedRollout) -> EvalItem:
    return EvalItem(
        id=example.id,
        input=example.input,
        expected=example.expected,
        output=rollout.output,
        row=example.row,
        calls=as_calls(rollout.calls),
        rollout_id=rollout.rollout_id,
        seconds=rollout.seconds,
    )


def _shown(result: EvalResult, redaction: Redaction) -> NewScore:
    if result.error is None:
        return NewScore(score=result.score, call_rewards=dict(result.call_rewards))
    raised = None if result.traceback is None else redaction.hide_traceback(result.traceback)
    frames: Sequence[str] = raised.frames if raised else ()
    return NewScore(score=None, error=redaction.hide(result.error), frames=list(frames))


async def _answered(request: RescoreRequest) -> RescoreAnswer:
    try:
        return await score(request)
    except InsituError as error:
        return RescoreAnswer(problem=error.message, hint=error.hint)


def main() -> None:
    """Answer one request."""
    answer(RescoreRequest, _answered)


if __name__ == "__main__":
    main()
