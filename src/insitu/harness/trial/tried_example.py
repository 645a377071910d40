"""TriedExample and Trial: the result of `insitu try`, and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from insitu.harness.trial.loop_watch import Blocked
from insitu.harness.trial.reward_check import CheckedExample, ScoredAnswer
from insitu.types import SCORED, Ending
from insitu.user_traceback import UserTraceback


@dataclass(frozen=True, slots=True)
class TriedExample:
    """One example: the agent's answer, its reward, and the reward of made-up answers."""

    id: str
    input: object
    expected: object
    output: object
    ending: Ending
    reward: float | None
    reasoning: object
    """The evaluator's."""
    reason: str
    """Why it failed."""
    traceback: UserTraceback | None
    num_calls: int | None
    """None: not known, because no gateway recorded them."""
    num_output_tokens: int | None
    seconds: float
    blocked: Blocked | None
    """The longest stop of the event loop, if the user's code blocked it."""
    checked: CheckedExample
    """The reward of made-up answers."""

    @property
    def failed(self) -> str:
        """`agent` or `reward`, whichever failed on the agent's own answer; empty if neither did."""
        if self.ending is Ending.EVALUATOR_ERROR:
            return "reward"
        return "" if self.ending in SCORED else "agent"

    def to_dict(self) -> dict[str, object]:
        """Serialize for `--json`."""
        blocked = (
            None if self.blocked is None else {"seconds": self.blocked.seconds, "where": self.blocked.where}
        )
        return {
            "id": self.id,
            "input": self.input,
            "expected": self.expected,
            "output": self.output,
            "ending": self.ending.value,
            "failed": self.failed or None,
            "reward": self.reward,
            "reasoning": self.reasoning,
            "error": self.reason or None,
            "traceback": None if self.traceback is None else self.traceback.text,
            "num_calls": self.num_calls,
            "num_output_tokens": self.num_output_tokens,
            "seconds": self.seconds,
            "blocked": blocked,
            "reward_check": {
                "told_apart": self.checked.told_apart,
                "why_not": self.checked.why_not or None,
                "answers": [_answer(each) for each in self.checked.answers],
            },
        }


@dataclass(frozen=True, slots=True)
class Trial:
    """All examples of one `insitu try`."""

    model: str
    address: str
    recorded: bool
    """True if a gateway recorded the calls."""
    examples: Sequence[TriedExample]
    notes: Sequence[str] = ()
    """Remarks from the dataset."""

    @property
    def ok(self) -> bool:
        """True if neither the agent nor the reward failed, on any answer."""
        made_up = [answer for example in self.examples for answer in example.checked.answers]
        return not any(example.failed for example in self.examples) and not any(
            answer.error is not None for answer in made_up
        )

    def to_dict(self) -> dict[str, object]:
        """Serialize for `--json`."""
        return {
            "ok": self.ok,
            "model": self.model,
            "address": self.address,
            "recorded": self.recorded,
            "examples": [example.to_dict() for example in self.examples],
            "notes": list(self.notes),
        }


def _answer(scored: ScoredAnswer) -> dict[str, object]:
    return {
        "kind": scored.kind,
        "answer": scored.answer,
        "score": scored.score,
        "error": scored.error,
        "traceback": None if scored.traceback is None else scored.traceback.text,
    }
