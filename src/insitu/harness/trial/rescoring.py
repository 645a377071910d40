"""Rescoring: the reward as it is on disk now, over the recorded rollouts of one example.

    insitu view ──► python -m insitu.harness.trial.rescoring   request on stdin, answer on stdout

A process of its own reads every module fresh, and can be ended whatever the reward does. It writes nothing.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from insitu.config.load import LoadedConfig, load_config, parse_config
from insitu.datasets.example import Example
from insitu.errors import ChildFailed, DeadlineExceeded, InsituError, InvalidRequest, one_line
from insitu.harness.assembly import Assembly
from insitu.harness.files.redaction import Redaction
from insitu.rewards.calls import as_calls
from insitu.rewards.items import EvalItem, EvalResult
from insitu.rewards.score import score_group
from insitu.user_traceback import UserTraceback

_MAX_SHOWN_CHARS = 500
# `Any` below is JSON of the user's own making: inputs, answers and messages.


class AskedRollout(BaseModel):
    """A recorded rollout, as far as a reward sees it."""

    model_config = ConfigDict(frozen=True)

    rollout_id: str
    output: Any
    calls: list[dict[str, Any]]
    """Without token ids."""
    seconds: float | None


class RescoreRequest(BaseModel):
    """The rollouts of one example, and where its reward is configured."""

    model_config = ConfigDict(frozen=True)

    config_file: str | None
    """None: `config`, as the run directory keeps it, without secrets."""
    config: dict[str, Any]
    directory: str
    """Code is also looked for here, if there is no configuration file."""
    example_id: str
    input: Any
    expected: Any
    rollouts: list[AskedRollout]
    seconds: float
    """Time limit of the whole process."""


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
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # also the user's folders stay as they are
    child = subprocess.Popen(
        # -P: files of the current directory are found by the names in the configuration alone.
        [sys.executable, "-P", "-m", "insitu.harness.trial.rescoring"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    try:
        output, said = child.communicate(json.dumps(request.model_dump()).encode(), timeout=request.seconds)
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(
            f"the reward gave no scores for {len(request.rollouts)} rollouts within {request.seconds:g} s",
            hint="call the reward by itself, in a Python shell, to see where it waits",
        ) from error
    finally:
        if child.poll() is None:
            os.killpg(child.pid, 9)  # with whatever the reward has started
            child.communicate()
    if child.returncode != 0:
        last = one_line(said.decode(errors="replace").strip().rpartition("\n")[2], _MAX_SHOWN_CHARS)
        raise ChildFailed(
            f"scoring ended with exit status {child.returncode}: {last or 'it said nothing'}",
            hint="call the reward by itself, in a Python shell, to see why",
        )
    answer = RescoreAnswer.model_validate(json.loads(output))
    if answer.problem is not None:
        raise InvalidRequest(answer.problem, hint=answer.hint)
    return answer


async def score(request: RescoreRequest) -> RescoreAnswer:
    """Build the reward of the configuration and score the rollouts, within its own time limit."""
    async with Assembly(_loaded(request)) as parts:
        config = parts.config
        evaluator = await parts.reward()
        example, note = await _example(parts, request)
        items = [_item(example, each) for each in request.rollouts]
        results = await score_group(evaluator, items, config.eval.general.evaluator_timeout_seconds)
        redaction = Redaction(config)
        name = config.finetuning.reward_function.name if config.finetuning.reward_function else ""
        return RescoreAnswer(scores=[_shown(each, redaction) for each in results], reward=name, note=note)


def _loaded(request: RescoreRequest) -> LoadedConfig:
    if request.config_file is not None:
        return load_config(request.config_file)
    return LoadedConfig(parse_config(request.config), None, Path(request.directory), request.config)


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


def main() -> None:
    """Answer one request."""
    out = os.dup(1)
    os.dup2(2, 1)  # what the reward prints must not mix with the answer
    request = RescoreRequest.model_validate(json.loads(sys.stdin.buffer.read()))
    signal.alarm(math.ceil(request.seconds) + 1)  # the end, also if whoever asked has gone
    try:
        answer = asyncio.run(score(request))
    except InsituError as error:
        answer = RescoreAnswer(problem=error.message, hint=error.hint or "")
    with os.fdopen(out, "wb") as file:
        file.write(json.dumps(answer.model_dump()).encode())


if __name__ == "__main__":
    main()
