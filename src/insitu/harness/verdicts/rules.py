"""The rules of the verdict, as a table: the most important cause first.

A rule speaks when all its conditions hold, and goes on until one of them is past its `release`, so that a
figure near a limit does not make it flicker. docs/training.md shows the same table; a test compares them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args

from insitu.types import Method

_HOLDS: dict[str, Callable[[float, float], bool]] = {">": operator.gt, "<": operator.lt}


class State(StrEnum):
    """The course of a run, as its rewards show it."""

    TOO_EARLY = "too_early"
    LEARNING = "learning"
    LEVEL = "level"
    """The rewards have risen and rise no more."""
    OVERFITTING = "overfitting"
    """The rewards of training rise, those of validations do not."""
    NOT_LEARNING = "not_learning"
    """No rise, and one that matters would have been seen."""
    FALLING = "falling"


ALWAYS = frozenset(State)
UNLESS_RISING = ALWAYS - {State.LEARNING}
UNLESS_LEARNT = frozenset({State.NOT_LEARNING, State.FALLING})
ANY_METHOD: frozenset[Method] = frozenset(get_args(Method))
COMPARING: frozenset[Method] = frozenset({"grpo", "dpo"})
"""Methods that learn from the differences between the rollouts of an example."""
ON_POLICY: frozenset[Method] = frozenset({"grpo", "distill"})
"""Methods that correct for how the rollouts were sampled."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A limit on one of the `Measures`."""

    figure: str
    sign: Literal["<", ">"]
    limit: float
    release: float
    """The limit while the rule speaks."""

    def holds(self, figures: Mapping[str, float], *, speaking: bool) -> bool:
        """Return True if the figure was measured and is past its limit."""
        value = figures.get(self.figure)
        return value is not None and _HOLDS[self.sign](value, self.release if speaking else self.limit)


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause: when it is told, in which words, and what to try."""

    name: str
    conditions: tuple[Condition, ...]
    states: frozenset[State]
    """The states in which it is told."""
    steps: int
    """Steps that the run needs before it is told."""
    sentence: str
    setting: str
    source: str
    """The reason for the limits."""
    covers: tuple[str, ...] = ()
    """Less specific rules that are not told beside it."""
    methods: frozenset[Method] = ANY_METHOD
    """The training methods under which it means trouble."""

    def applies(
        self,
        state: State,
        num_steps: int,
        figures: Mapping[str, float],
        method: Method = "grpo",
        *,
        speaking: bool,
    ) -> bool:
        """Return True if the rule is to be told; `speaking` if it was after the step before."""
        if state not in self.states or num_steps < self.steps or method not in self.methods:
            return False
        return all(condition.holds(figures, speaking=speaking) for condition in self.conditions)


RULES = (
    Rule(
        name="updates_skipped",
        conditions=(Condition("skipped", ">", 0.3, 0.1),),
        states=ALWAYS,
        steps=2,
        sentence="{skipped:.0%} of the latest updates were skipped, because their gradient was not finite",
        setting="lower {training}.learning_rate, or serve with --dtype float32",
        source="such a gradient leaves the weights as they were; it should not happen twice in a few steps",
    ),
    Rule(
        name="not_arriving",
        conditions=(Condition("applied", "<", 0.5, 0.6),),
        states=ALWAYS,
        steps=2,
        sentence="only {applied:.0%} of what training changes reaches the model that answers the agent",
        setting="raise {training}.learning_rate, or serve with --dtype float32 or --publication adapter",
        source="`probe/applied` is 1 for exact publication; below 0.5 most of an update is lost",
    ),
    Rule(
        name="mismatch",
        conditions=(Condition("mismatch", ">", 0.03, 0.02),),
        states=ALWAYS,
        steps=2,
        sentence="the model that answers and the model in training disagree (mismatch/kl {mismatch:.2g} on "
        "fresh tokens, healthy is below 0.01)",
        setting="serve with --dtype float32 or float16, or lower {training}.learning_rate",
        source="chosen; 0.01 is still healthy",
        methods=ON_POLICY,
    ),
    Rule(
        name="stale_rollouts",
        conditions=(Condition("stale_mismatch", ">", 0.03, 0.02), Condition("mismatch", "<", 0.03, 0.04)),
        states=UNLESS_RISING,
        steps=2,
        sentence="rollouts of earlier weights are far from the model in training (mismatch/stale_kl "
        "{stale_mismatch:.2g}; on fresh tokens {mismatch:.2g})",
        setting="lower {training}.max_staleness or {training}.learning_rate, or set "
        "finetuning.max_mismatch_kl to 0.03",
        source="chosen, as for `mismatch`",
        methods=ON_POLICY,
    ),
    Rule(
        name="all_truncated",
        conditions=(Condition("truncated", ">", 0.9, 0.8),),
        states=ALWAYS,
        steps=1,
        sentence="{truncated:.0%} of the rollouts were cut off at the token limit, and those are not trained "
        "on",
        setting="raise {llm}.max_tokens, or ask for shorter answers in the prompt; see the answers with "
        "`insitu trajectories list {output_dir}`",
        source="certain at the first step: less than a tenth of the rollouts can teach",
        covers=("truncated", "too_few_updates"),
    ),
    Rule(
        name="context_overflow",
        conditions=(Condition("overflow", ">", 0.2, 0.1),),
        states=ALWAYS,
        steps=1,
        sentence="{overflow:.0%} of the rollouts outgrew the model's context and were dropped, so nothing "
        "teaches the agent to be brief",
        setting="give them a reward with finetuning.ending_rewards.context_overflow, serve with a larger "
        "--max-seq-length, or let the agent keep less of its history",
        source="tests/unit/training/test_failures_counted.py: a policy that is never told of its overflows "
        "learns to overflow",
        methods=COMPARING,
    ),
    Rule(
        name="failed_rollouts",
        conditions=(Condition("failed", ">", 0.3, 0.2),),
        states=ALWAYS,
        steps=1,
        sentence="{failed:.0%} of the rollouts failed, most with `{ending}`",
        setting="see why with `insitu trajectories list {output_dir} --ending {ending}`",
        source="chosen: with a third of the rollouts missing, a group of 8 is one of 5",
        covers=("too_few_updates",),
    ),
    Rule(
        name="low_temperature",
        conditions=(Condition("temperature", "<", 0.5, 0.6), Condition("equal", ">", 0.5, 0.4)),
        states=ALWAYS,
        steps=1,
        sentence="the agent's calls are sampled at temperature {temperature:.2g}, and {equal:.0%} of the "
        "rollouts earn the same as all others of their example",
        setting="set {llm}.temperature to 1, and in the agent's code if it is set there",
        source="rollouts of one example must differ to be compared; RL recipes sample at 1",
        covers=("no_spread", "unusual_temperature"),
        methods=COMPARING,
    ),
    Rule(
        name="constant_reward",
        conditions=(Condition("reward_range", "<", 1e-9, 1e-9), Condition("num_rewarded", ">", 15, 15)),
        states=ALWAYS,
        steps=1,
        sentence="every rollout so far has earned the same reward, {reward:.4g}",
        setting="check {evaluator} on a few rollouts (`insitu trajectories list {output_dir}`), give part of "
        "the reward for partial success, or begin with easier examples",
        source="16 rollouts without a success rule out a success rate of 18 % or more (at 5 %)",
        methods=COMPARING,
    ),
    Rule(
        name="solved",
        conditions=(Condition("equal", ">", 0.7, 0.6), Condition("unused_level", ">", 0.9, 0.85)),
        states=ALWAYS,
        steps=2,
        sentence="{equal:.0%} of the rollouts belong to examples that are solved every time",
        setting="stop here, or go on with harder examples",
        source="the limit of `no_spread`, with rewards within a tenth of the best of the run",
        covers=("no_spread",),
        methods=COMPARING,
    ),
    Rule(
        name="no_spread",
        conditions=(Condition("equal", ">", 0.7, 0.6), Condition("unused_level", "<", 0.9, 0.95)),
        states=UNLESS_RISING,
        steps=4,
        sentence="{equal:.0%} of the rollouts earn the same as all others of their example, so there is "
        "nothing to compare",
        setting="raise {builder}.num_generations, set finetuning.groups_per_step and max_refill, give part "
        "of the reward for partial success, or begin with easier examples",
        source="above 70 %, fewer than a third of the rollouts teach anything",
        methods=COMPARING,
    ),
    Rule(
        name="truncated",
        conditions=(Condition("truncated", ">", 0.3, 0.2),),
        states=UNLESS_LEARNT,
        steps=4,
        sentence="{truncated:.0%} of the rollouts were cut off at the token limit, and those are not trained "
        "on",
        setting="raise {llm}.max_tokens, or ask for shorter answers in the prompt",
        source="chosen; a run that learns to be brief starts above it and is not blamed while it learns",
    ),
    Rule(
        name="entropy_collapse",
        conditions=(Condition("entropy", "<", 0.2, 0.3), Condition("reward_level", "<", 0.5, 0.6)),
        states=UNLESS_RISING,
        steps=6,
        sentence="the model has stopped trying different answers before it found good ones (its entropy is "
        "{entropy:.0%} of that at the start)",
        setting="lower {training}.learning_rate, or set {training}.entropy_bonus to 0.001",
        source="chosen; a run that has found good answers loses entropy too and is not blamed",
        methods=frozenset({"grpo"}),
    ),
    Rule(
        name="unusual_temperature",
        conditions=(Condition("temperature_gap", ">", 0.3, 0.25),),
        states=UNLESS_LEARNT,
        steps=4,
        sentence="the agent's calls are sampled at temperature {temperature:.2g}",
        setting="set {llm}.temperature to 1, and in the agent's code if it is set there",
        source="RL recipes sample at 1; colder samples differ less, hotter ones are mostly noise",
        methods=ON_POLICY,
    ),
    Rule(
        name="narrowed_sampling",
        conditions=(Condition("narrowed", ">", 0.5, 0.4),),
        states=UNLESS_LEARNT,
        steps=4,
        sentence="{narrowed:.0%} of the calls are sampled with {sampling}, which training cannot undo",
        setting="remove {sampling} from {llm} and from the agent's code",
        source="chosen; tokens that were cut off have no probability that a weight could correct",
        methods=ON_POLICY,
    ),
    Rule(
        name="small_updates",
        conditions=(Condition("update", "<", 0.002, 0.003),),
        states=frozenset({State.NOT_LEARNING}),
        steps=4,
        sentence="an update changes the model's log-probabilities by {update:.1g} on average, hardly at all",
        setting="double {training}.learning_rate",
        source="chosen",
        methods=ON_POLICY,
    ),
    Rule(
        name="too_few_updates",
        conditions=(Condition("planned_share", "<", 1, 1),),
        states=frozenset({State.TOO_EARLY}),
        steps=1,
        sentence="the whole run is planned for {planned}, and it takes about {needed_updates:.0f} to tell a "
        "rise from chance",
        setting="raise finetuning.num_epochs, or lower finetuning.groups_per_step",
        source="the scatter between the steps so far; before ten steps, ten updates",
        methods=ON_POLICY,
    ),
)
