"""Sequences: the recorded tokens of a rollout's calls, joined where one call extends another.

    call 1   prompt ids ─ output ids
    call 2   prompt ids of call 1 ─ output ids of call 1 ─ new ids ─ output ids     extends call 1
    call 3   other prompt ids ─ output ids                                          another sequence

Nothing is tokenised: all ids are those that the engine saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from insitu.harness.rollouts.recorded_call import RecordedCall, complete
from insitu.harness.rollouts.rollout import Rollout, RolloutDetails


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens that were read, or the answer of one call."""

    length: int
    call_id: str | None
    """The call that sampled them; None if they were read."""
    logprobs: Sequence[float] = ()
    """The sampler's, one per token, if they were sampled."""


@dataclass(frozen=True, slots=True)
class TokenPath:
    """A path of tokens."""

    ids: list[int]
    stretches: Sequence[Stretch]

    @property
    def call_ids(self) -> list[str]:
        """The calls whose answers are in it, in order."""
        return [each.call_id for each in self.stretches if each.call_id is not None]

    def sampled_at(self, place: int) -> tuple[str, int] | None:
        """Return the call that sampled a token, and its place in the answer; None if it was read."""
        for stretch in self.stretches:
            if place < stretch.length:
                return None if stretch.call_id is None else (stretch.call_id, place)
            place -= stretch.length
        return None


def shown_calls(details: RolloutDetails, rollout: Rollout) -> list[RecordedCall]:
    """Return the calls whose tokens are shown, in full: those that may be trained on, or else all."""
    chosen = set(rollout.call_ids)
    return [call for call in complete(details.calls) if not chosen or call["id"] in chosen]


def sequences_of(calls: Sequence[RecordedCall]) -> list[TokenPath]:
    """Return the sequences of complete calls that have tokens, in the order in which they begin."""
    made: list[TokenPath] = []
    for call in calls:
        prompt, output = call.get("prompt_ids"), call.get("output_ids")
        if prompt is None or output is None:
            continue
        answer = Stretch(len(output), call["id"], call.get("logprobs") or [])
        place = _extended(made, prompt)
        if place is None:
            read = [Stretch(len(prompt), None)] if prompt else []
            made.append(TokenPath([*prompt, *output], [*read, answer]))
        else:
            before = made[place]
            new = len(prompt) - len(before.ids)
            read = [Stretch(new, None)] if new else []
            made[place] = TokenPath([*prompt, *output], [*before.stretches, *read, answer])
    return made


def _extended(made: Sequence[TokenPath], prompt: list[int]) -> int | None:
    """Return the longest sequence that the prompt begins with."""
    best: int | None = None
    for place, sequence in enumerate(made):
        longer = best is None or len(sequence.ids) > len(made[best].ids)
        if (
            longer
            and len(sequence.ids) <= len(prompt)
            and list(prompt[: len(sequence.ids)]) == list(sequence.ids)
        ):
            best = place
    return best
