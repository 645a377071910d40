"""Groups: one example's rollouts as a prefix tree, and the example over the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from insitu.wire.message import Answer
from insitu.wire.values import AnyObject, AnyValue, Count
from insitu.wire.views.rollouts import AdvantageBasis, Fate, RolloutRow


@dataclass(frozen=True, slots=True)
class TreeSpan(Answer):
    """A stretch of a node's tokens that all siblings through the node treat alike."""

    length: Count
    kind: Literal["context", "sampled"]
    """`sampled` if at least one sibling sampled it."""
    num_sampled: Count
    """Siblings that sampled these tokens; others read them."""
    num_trained: Count
    """Siblings that are trained on these tokens."""
    advantage_sum: float | None
    """The sum of the advantages of those; null if there are none."""
    reasons: list[str]
    """Why siblings that sampled these tokens are not trained on them."""
    policy_steps: list[Count]
    """The weights that sampled them."""
    logprobs: list[float] | None
    """The mean over the siblings that sampled each token; null if none did."""
    trainer_logprobs: list[float] | None = None
    """The same of the trainer's; null where the run does not keep them."""


@dataclass(frozen=True, slots=True)
class TreeNode(Answer):
    """A stretch of tokens between two forks."""

    id: Count
    """Its place in the list of nodes; 0 is the root."""
    parent: Count | None
    children: list[Count]
    depth: Count
    """Tokens before it."""
    ids: list[int]
    texts: list[str] | None
    """One per id; null if the tokenizer is not known here."""
    spans: list[TreeSpan]
    """Their lengths add up to the number of ids."""
    branches: list[Count]
    """Places of the branches that pass through it."""


@dataclass(frozen=True, slots=True)
class Branch(Answer):
    """A path from the root: one sequence of tokens of one sibling.

    A rollout whose calls extend one another has one branch, others one for each sequence.
    """

    sibling: Count
    """Its place in the list of siblings."""
    sequence: Count
    """Its number among the sequences of the rollout, from 0."""
    node: Count
    """The node at whose last token it ends."""
    num_tokens: Count
    call_ids: list[str]


@dataclass(frozen=True, slots=True)
class TreeView(Answer):
    """`GET /view/v1/runs/{run}/tree`: any rollouts as a prefix tree that forks at the first other token."""

    siblings: list[RolloutRow]
    advantages: list[list[float] | None]
    """Of each sibling: the advantage of each call that may be trained on; null if it has none."""
    nodes: list[TreeNode]
    branches: list[Branch]
    num_prompt_tokens: Count
    """Tokens that all branches share before any of them was sampled."""
    prompt: list[AnyObject]
    """The messages of the first call, for the head of the page."""
    basis: AdvantageBasis
    without_tokens: list[str]
    """Rollouts without any tokens, which have no branch."""


@dataclass(frozen=True, slots=True)
class GroupAtStep(Answer):
    """The same example in another file of rollouts."""

    store: str
    epoch: Count | None
    step_of_epoch: Count | None
    index: Count
    policy_step: Count | None
    num_rollouts: Count
    reward: float | None
    """The mean over its rollouts."""
    reward_min: float | None
    reward_max: float | None
    num_trained: Count


@dataclass(frozen=True, slots=True)
class GroupView(Answer):
    """`GET /view/v1/runs/{run}/groups/{store}/{index}`."""

    store: str
    index: Count
    example_id: str
    input: AnyValue
    expected: AnyValue
    reward: float | None
    """The mean reward."""
    reward_std: float | None
    tree: TreeView
    steps: list[GroupAtStep]
    """The example in every file of training rollouts (or of validations, if this is one), in order."""
    num_left_out: Count
    """Siblings beyond the limit."""


@dataclass(frozen=True, slots=True)
class RescoredSibling(Answer):
    """A rollout with the reward that it was given, and the one that the reward gives now."""

    rollout_id: str
    generation: Count
    reward: float | None
    new_reward: float | None
    """Null if the reward gave none; the old one for a rollout that failed before it could be scored."""
    advantage: float | None
    """The mean over its calls."""
    new_advantage: float | None
    new_advantages: list[float] | None
    """Of each call that may be trained on."""
    fate: Fate
    """Under the new rewards."""
    reason: str | None
    error: str | None
    """Why the reward gave none."""
    frames: list[str]
    """The frames of the user's own files in which it raised, outermost first."""


@dataclass(frozen=True, slots=True)
class RescoredGroup(Answer):
    """`POST /view/v1/runs/{run}/groups/{store}/{index}/rescore`: nothing of it is kept."""

    store: str
    index: Count
    reward_function: str
    """Its name in `eval.evaluators`."""
    siblings: list[RescoredSibling]
    basis: AdvantageBasis
    note: str
    """The difference from the rollouts' own scoring; empty if there is none."""


@dataclass(frozen=True, slots=True)
class ResampledBranch(Answer):
    """A continuation that was sampled from a fork just now: it is not trained on and has no advantage."""

    call_id: str
    """Its call in the gateway's record."""
    ids: list[int]
    texts: list[str] | None
    logprobs: list[float]
    """The sampler's, one per id."""
    finish_reason: str
    text: str
    """As an agent receives it."""
    reward: float | None
    """By the reward as it is on disk now; null if it was not scored."""
    error: str | None
    """Why the reward gave none."""


@dataclass(frozen=True, slots=True)
class ResampledFork(Answer):
    """`POST /view/v1/runs/{run}/groups/{store}/{index}/resample`: nothing of it is kept."""

    rollout_id: str
    sequence: Count
    depth: Count
    """The continuations follow the first so many tokens of that sequence of the rollout."""
    step: Count | None
    """Null: the base model."""
    model: str
    """The name that was called."""
    version: str
    """The weights, as the engine reports them."""
    branches: list[ResampledBranch]
    score_gap: float | None
    """Largest difference between recorded and new scores of the tokens after the fork, by the same weights.
    Null without two such tokens."""
    note: str
    """A remark on the sampling or on the missing score; empty if there is none."""
    reward_note: str
    """Why the continuations were not scored; empty if they were."""


@dataclass(frozen=True, slots=True)
class GroupRow(Answer):
    """A group in a table."""

    store: str
    epoch: Count | None
    step_of_epoch: Count | None
    index: Count
    example_id: str
    question: str
    num_rollouts: Count
    reward: float | None
    reward_min: float | None
    reward_max: float | None
    num_trained: Count


@dataclass(frozen=True, slots=True)
class GroupPage(Answer):
    """`GET /view/v1/runs/{run}/groups`."""

    groups: list[GroupRow]
    next: str | None
    total: Count
