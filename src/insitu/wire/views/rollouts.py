"""Rollouts: a page of them, and one in full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from insitu.wire.message import Answer
from insitu.wire.values import AnyObject, AnyValue, Count

Fate = Literal["trained", "dropped", "waiting", "validation", "set_aside"]
"""Of a rollout. `waiting`: its step has not been selected yet."""
CallFate = Literal["trained", "context", "dropped", "waiting", "validation", "set_aside"]
"""Of the tokens that a call sampled. `context`: another model or function answered."""
AdvantageBasis = Literal["trainer_function", "reward_minus_group_mean", "none"]
"""`trainer_function`: computed here by the trainer's own function and the run's settings.
`reward_minus_group_mean`: the run's settings are not known here. `none`: the method has no advantages, or
the rollouts are not for training."""


@dataclass(frozen=True, slots=True)
class RolloutRow(Answer):
    """A rollout in a table."""

    rollout_id: str
    store: str
    epoch: Count | None
    step_of_epoch: Count | None
    example_id: str
    index: Count
    """The position of the example in its dataset; with `store` it names the group."""
    generation: Count
    question: str
    """The beginning of the input."""
    answer: str
    """The beginning of the output."""
    reward: float | None
    advantage: float | None
    """The mean over its calls; null if it has none. See the group's `basis`."""
    ending: str
    failure: str
    """Why it failed, in words; empty if it did not."""
    fate: Fate
    reason: str | None
    """Why it was dropped: `zero_variance`, `truncated`, `failed`, …"""
    num_calls: Count
    num_output_tokens: Count
    policy_steps: list[Count]
    seconds: float | None
    started_at: float | None


@dataclass(frozen=True, slots=True)
class RolloutPage(Answer):
    """`GET /view/v1/runs/{run}/rollouts`."""

    rollouts: list[RolloutRow]
    next: str | None
    """The cursor of the next page; null at the end."""
    total: Count
    """Rollouts that match the filters."""
    endings: Mapping[str, Count]
    """By ending, over the whole run: for the filter."""
    reasons: Mapping[str, Count]
    """By reason, over the whole run; rollouts without a reason by their fate."""


@dataclass(frozen=True, slots=True)
class TokenColumn(Answer):
    """A stretch of tokens, one entry per token in each list."""

    ids: list[int]
    texts: list[str] | None
    """Null if the tokenizer is not known here."""
    logprobs: list[float] | None
    """The sampler's; null for tokens that were read."""
    trainer_logprobs: list[float] | None = None
    """The trainer's; null where the run does not keep them."""


@dataclass(frozen=True, slots=True)
class CallView(Answer):
    """One model call."""

    id: str
    model: str
    function: str | None
    policy_step: Count
    policy_version: str
    finish_reason: str
    constrained: bool
    parent_id: str | None
    """The earlier call that it continues."""
    shared_tokens: Count
    """Tokens of the prompt that are the parent's prompt and output, and not repeated in `prompt`."""
    shared_messages: Count
    fate: CallFate
    reason: str | None
    """Why its tokens were dropped or are only context."""
    advantage: float | None
    """Of every token that it sampled."""
    call_reward: float | None
    """Its own reward beyond the rollout's."""
    messages: list[AnyObject]
    """Those that the parent does not have."""
    answer: AnyObject | None
    tools: list[AnyObject] | None
    """Null if they are the parent's, or none were given."""
    sampling: AnyObject
    timings: Mapping[str, float]
    started_at: float | None
    num_prompt_tokens: Count
    num_output_tokens: Count
    prompt: TokenColumn | None
    """The call's own part of the prompt; null without `tokens`, or if none are kept."""
    output: TokenColumn | None


@dataclass(frozen=True, slots=True)
class Sibling(Answer):
    """A rollout of the same group, in short."""

    rollout_id: str
    generation: Count
    reward: float | None
    advantage: float | None
    ending: str
    fate: Fate
    reason: str | None


@dataclass(frozen=True, slots=True)
class TracebackView(Answer):
    """An exception of the agent or the reward."""

    text: str
    error: str
    frames: list[str]
    """The lines of the user's own files."""


@dataclass(frozen=True, slots=True)
class RolloutView(Answer):
    """`GET /view/v1/runs/{run}/rollouts/{rollout_id}`."""

    row: RolloutRow
    input: AnyValue
    expected: AnyValue
    output: AnyValue
    reasoning: AnyValue
    """The evaluator's."""
    reward_parts: Mapping[str, float]
    """The parts of a composite reward, by name."""
    calls: list[CallView]
    """In the order of the record; a call comes after its parent."""
    num_calls_left_out: Count
    """Calls beyond the limit of an answer."""
    capture: AnyObject | None
    """The account of its calls: seen, trained, context_only, dropped."""
    traceback: TracebackView | None
    siblings: list[Sibling]
    """Of its group, itself included."""
    basis: AdvantageBasis
    tokens_problem: str
    """Why there are no tokens, in words; empty if there are."""
