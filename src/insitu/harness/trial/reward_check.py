"""RewardCheck: what the reward gives the gold answer, an empty one and a constant one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

from insitu.datasets.example import Example
from insitu.harness.collect.agent_rollouts import eval_item
from insitu.harness.files.redaction import Redaction
from insitu.harness.rollouts.rollout import Rollout
from insitu.rewards.calls import Call
from insitu.rewards.evaluator import Evaluator, GroupEvaluator
from insitu.rewards.score import score_group
from insitu.user_traceback import UserTraceback

GOLD, EMPTY, CONSTANT = "gold", "empty", "constant"
CONSTANT_ANSWER = "I do not know."
_NAMES = {
    "str": "a text",
    "bool": "a boolean",
    "int": "a number",
    "float": "a number",
    "list": "a list",
    "dict": "an object",
    "NoneType": "nothing",
}
_READS_CALLS = "the reward reads the model calls of a rollout, and a made-up answer has none"


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """An answer that no model gave, and its score."""

    kind: str
    """`gold`, `empty` or `constant`."""
    answer: object
    score: float | None
    error: str | None = None
    traceback: UserTraceback | None = None


@dataclass(frozen=True, slots=True)
class CheckedExample:
    """The made-up answers to one example."""

    example_id: str
    answers: Sequence[ScoredAnswer] = ()
    why_not: str = ""
    """Why the check is not complete; empty if it is."""

    def score(self, kind: str) -> float | None:
        """Return the score of an answer; None if it has none."""
        return next((each.score for each in self.answers if each.kind == kind), None)

    @property
    def told_apart(self) -> bool | None:
        """True if the gold answer scores more than the others; None if that is not known."""
        gold, others = self.score(GOLD), [self.score(EMPTY), self.score(CONSTANT)]
        known = [score for score in others if score is not None]
        return None if gold is None or not known else all(gold > score for score in known)


async def check_reward(
    evaluator: Evaluator | GroupEvaluator,
    example: Example,
    rollout: Rollout,
    seconds: float,
    redaction: Redaction,
) -> CheckedExample:
    """Score made-up answers to an example that the agent has answered."""
    made, why_not = _answers(example, rollout.details().output)
    if not made:
        return CheckedExample(example.id, (), why_not)
    calls = _WatchedCalls()
    real = eval_item(example, rollout)
    items = [replace(real, output=answer, calls=calls) for answer in made.values()]
    results = await score_group(evaluator, items, seconds)
    if calls.read:
        return CheckedExample(example.id, (), _READS_CALLS)
    scored = [
        ScoredAnswer(
            kind,
            answer,
            result.score,
            None if result.error is None else redaction.hide(result.error),
            None if result.traceback is None else redaction.hide_traceback(result.traceback),
        )
        for (kind, answer), result in zip(made.items(), results, strict=True)
    ]
    return CheckedExample(example.id, scored, why_not)


def _answers(example: Example, output: object) -> tuple[dict[str, object], str]:
    """Return the answers that can be made up, and why not all."""
    expected = example.expected
    if output is not None and not isinstance(output, str):
        kind = _named(output)
        if type(expected) is type(output):
            return {GOLD: expected}, f"the agent returns {kind}: an empty or constant text is no answer of it"
        return {}, f"the agent returns {kind} and the dataset expects {_named(expected)}"
    made: dict[str, object] = {EMPTY: "", CONSTANT: CONSTANT_ANSWER}
    if isinstance(expected, str) and expected:
        return {GOLD: expected, **made}, ""
    if isinstance(expected, int | float) and not isinstance(expected, bool):
        return {GOLD: json.dumps(expected), **made}, ""
    return (
        made,
        f"there is no gold answer: the dataset expects {_named(expected)}, and the agent returns text",
    )


def _named(value: object) -> str:
    return "an empty text" if value == "" else _NAMES.get(type(value).__name__, type(value).__name__)


class _WatchedCalls(Sequence[Call]):
    """No calls; notices that somebody looks at them."""

    def __init__(self) -> None:
        self.read = False

    def __len__(self) -> int:
        self.read = True
        return 0

    def __iter__(self) -> Iterator[Call]:
        self.read = True
        return iter(())

    @overload
    def __getitem__(self, index: int) -> Call: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Call]: ...
    def __getitem__(self, index: int | slice) -> Call | Sequence[Call]:
        self.read = True
        return ()[index]
