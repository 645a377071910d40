"""The stored form of a rollout: one JSON object, converted in both directions here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

from insitu.harness.files.token_file import TokenSpan
from insitu.harness.rollouts.call_rewards import trained_call_rewards
from insitu.harness.rollouts.capture import Capture
from insitu.harness.rollouts.fields import items, members, numbers, optional_number, text, texts, whole
from insitu.harness.rollouts.recorded_call import recorded_calls
from insitu.harness.rollouts.rollout import Rollout, RolloutDetails, RolloutFigures, RolloutSource
from insitu.types import REWARD_COMPONENTS, Ending
from insitu.user_traceback import UserTraceback

Line = Mapping[str, object]


def to_line(rollout: Rollout, details: RolloutDetails, tokens: TokenSpan | None = None) -> dict[str, object]:
    """Return the object to store; `tokens` names the block that holds the tokens of the calls."""
    line: dict[str, object] = {
        "rollout_id": rollout.rollout_id,
        "example_id": rollout.example_id,
        "index": rollout.index,
        "generation": rollout.generation,
        "attempt": rollout.attempt,
        "ending": rollout.ending,
        "reward": rollout.reward,
        "reason": rollout.reason,
        "reasoning": details.reasoning,
        "seconds": rollout.seconds,
        "started_at": rollout.started_at,
        "call_ids": list(rollout.call_ids),
        "call_rewards": dict(details.call_rewards),
        "dropped": dict(details.dropped),
        "metadata": rollout.figures.to_dict(),
        "input": details.input,
        "expected": details.expected,
        "output": details.output,
        "calls": list(details.calls),
    }
    if rollout.inline:
        line["inline"] = True
    if (raised := details.traceback) is not None:
        line |= {"traceback": raised.text, "raised": {"error": raised.error, "frames": list(raised.frames)}}
    return line if tokens is None else line | {"tokens": asdict(tokens)}


def from_line(line: Line, source: RolloutSource) -> Rollout:
    """Read the rollout; its details stay where `source` finds them.

    Raises KeyError, TypeError or ValueError for an object that is no rollout.
    """
    reward = optional_number(line.get("reward"))
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}")
    call_ids = tuple(map(text, items(line.get("call_ids"))))
    made = (text(members(call).get("id")) for call in items(line.get("calls")))
    return Rollout(
        rollout_id=text(line["rollout_id"]),
        example_id=text(line["example_id"]),
        index=whole(line["index"]),
        generation=whole(line["generation"]),
        attempt=whole(line.get("attempt", 0)),
        ending=Ending(line["ending"]),
        reward=reward,
        reason=text(line.get("reason") or ""),
        call_ids=call_ids,
        call_rewards=trained_call_rewards(_call_rewards(line), call_ids, made),
        figures=_figures(members(line.get("metadata"))),
        seconds=optional_number(line.get("seconds")),
        started_at=optional_number(line.get("started_at")),
        inline=line.get("inline") is True,
        source=source,
    )


def details_of(line: Line) -> RolloutDetails:
    """Read the details; calls whose tokens are in a block come without them."""
    return RolloutDetails(
        input=line.get("input"),
        expected=line.get("expected"),
        output=line.get("output"),
        reasoning=line.get("reasoning"),
        calls=recorded_calls(items(line.get("calls"))),
        dropped=texts(line.get("dropped", line.get("left_out"))),
        call_rewards=_call_rewards(line),
        traceback=_traceback(line),
    )


def tokens_of(line: Line) -> TokenSpan | None:
    """Read where the tokens are; None if they are in the line itself, as earlier releases wrote it."""
    if line.get("tokens") is None:
        return None
    span = members(line["tokens"])
    return TokenSpan(whole(span["offset"]), whole(span["length"]), whole(span["crc32"]))


def _traceback(line: Line) -> UserTraceback | None:
    if line.get("traceback") is None:
        return None
    raised = members(line.get("raised"))
    frames = tuple(map(text, items(raised.get("frames"))))
    return UserTraceback(text(line["traceback"]), text(raised.get("error") or ""), frames)


def _call_rewards(line: Line) -> dict[str, float]:
    # Earlier releases wrote `step_rewards`, and `left_out` for `dropped`.
    return numbers(line.get("call_rewards", line.get("step_rewards")))


def _figures(written: Mapping[str, object]) -> RolloutFigures:
    capture = written.get("capture")
    return RolloutFigures(
        num_calls=whole(written.get("num_calls", 0)),
        num_output_tokens=whole(written.get("num_output_tokens", 0)),
        policy_steps=tuple(map(whole, items(written.get("policy_steps")))),
        capture=None if capture is None else Capture.from_dict(members(capture)),
        components=numbers(written.get(REWARD_COMPONENTS)),
        temperature=optional_number(written.get("temperature")),
    )
