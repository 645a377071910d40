"""The settings that a client sends for a training step."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from annotated_types import Interval

from insitu.wire.message import Message
from insitu.wire.values import Label, Reward, StepCount

Loss = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"]
AdvantageKind = Literal["std", "mean", "rloo"]
Method = Literal["grpo", "sft", "dpo", "distill"]


@dataclass(frozen=True, slots=True)
class StepSettings(Message):
    """The settings of one training step; every field is honoured."""

    learning_rate: Annotated[float, Interval(ge=0, le=1)] = 5e-5
    """The learning rate of AdamW."""
    loss: Loss = "dapo"
    """See `insitu.training.objective`."""
    advantage: AdvantageKind | None = None
    """None uses the loss's default."""
    clip_low: Annotated[float, Interval(gt=0, le=1)] | None = None
    """None uses the loss's default."""
    clip_high: Annotated[float, Interval(gt=0, le=100)] | None = None
    """None uses the loss's default."""
    max_sampler_weight: Annotated[float, Interval(ge=1, le=100)] | None = 2.0
    """Cap on the importance weights that correct for the sampler's own logprobs; None means no weights."""
    beta: Annotated[float, Interval(ge=0, le=100)] = 0.0
    """Weight of the KL penalty to the reference."""
    reference_step: StepCount | None = None
    """The checkpoint used as the reference; None uses the base model (the adapter switched off)."""
    entropy_bonus: Annotated[float, Interval(ge=0, le=100)] = 0.0
    """Weight of an entropy term that keeps the policy varied."""
    num_passes: Annotated[int, Interval(ge=1, le=32)] = 1
    """Optimizer steps over the same batch."""
    mask_truncated: bool = True
    """Rollouts that ended at a length limit count in their group's baseline, but are not trained on. Of those
    that failed and have a reward, only a last call that was cut off is left out. A teacher judges every token
    for itself, so `distill` trains on all of them."""
    mask_constrained: bool = False
    """Exclude tokens that a grammar constrained from the loss."""
    max_staleness: StepCount = 4
    """Drop groups with a call to a policy more than this many steps old."""
    max_rollout_tokens: Annotated[int, Interval(ge=1, lt=2**31)] | None = None
    """The constant length of dr_grpo and rloo; None uses the step's longest rollout."""
    max_grad_norm: Annotated[float, Interval(gt=0, le=1e6)] = 1.0
    """Longer gradients are scaled down to this norm."""
    adam_beta2: Annotated[float, Interval(ge=0, lt=1)] | None = None
    """The decay of AdamW's second moment; None uses 0.999."""
    overlong_tokens: Annotated[int, Interval(ge=1, lt=2**31)] | None = None
    """Sampled tokens of a rollout from which on it loses the whole `overlong_penalty`; None: no penalty."""
    overlong_buffer: Annotated[int, Interval(ge=1, lt=2**31)] | None = None
    """Tokens before `overlong_tokens` over which the penalty grows from 0; None uses a fifth of them."""
    overlong_penalty: Annotated[float, Interval(gt=0, le=1e9)] | None = None
    """Reward that an overlong rollout loses; None uses 1."""
    method: Method = "grpo"
    """The way in which rollouts teach; `loss` belongs to `grpo`. See `insitu.training.objective`."""
    min_reward: Reward | None = None
    """sft: train on rollouts of at least this reward; None takes all."""
    dpo_beta: Annotated[float, Interval(gt=0, le=100)] | None = None
    """dpo: how strongly the reference holds the policy back; None uses 0.1."""
    teacher: Label | None = None
    """distill, required there: `<run>@<step>` of this backend, or a name of `insitu serve --teacher`."""

    def check(self) -> None:
        """Reject settings that the method does not use, and a penalty on length that makes no sense."""
        unused = [
            field.name
            for field in fields(self)
            if self.method not in METHODS_OF.get(field.name, (self.method,))
            and getattr(self, field.name) != field.default
        ]
        if unused:
            raise ValueError(f"method {self.method} does not use {', '.join(unused)}: leave it out")
        if self.method == "distill" and self.teacher is None:
            raise ValueError("method distill needs a teacher: <run>@<step>, or a name of serve --teacher")
        if self.overlong_tokens is None:
            if self.overlong_buffer is not None or self.overlong_penalty is not None:
                raise ValueError("overlong_buffer and overlong_penalty need overlong_tokens")
        elif self.overlong_buffer is not None and self.overlong_buffer > self.overlong_tokens:
            raise ValueError("overlong_buffer is longer than overlong_tokens")

    @property
    def is_on_policy(self) -> bool:
        """True if the tokens must have been sampled by the policy in training, or a recent version of it."""
        return self.method in ("grpo", "distill")

    @property
    def leaves_truncated_out(self) -> bool:
        """True if answers that were cut off do not teach."""
        return self.mask_truncated and self.method != "distill"

    @property
    def teaches_without_advantage(self) -> bool:
        """True if a KL penalty or an entropy bonus gives a gradient to tokens of zero advantage."""
        return self.beta > 0 or self.entropy_bonus > 0

    @property
    def trains_equal_groups(self) -> bool:
        """True if a group whose rewards are all equal may teach: by its method, these two, or its lengths."""
        by_method = self.method in ("sft", "distill")
        return by_method or self.teaches_without_advantage or self.overlong_tokens is not None


METHODS_OF: dict[str, tuple[Method, ...]] = {
    **dict.fromkeys(("loss", "advantage", "clip_low", "clip_high", "max_rollout_tokens"), ("grpo",)),
    **dict.fromkeys(("beta", "entropy_bonus"), ("grpo",)),
    **dict.fromkeys(("overlong_tokens", "overlong_buffer", "overlong_penalty"), ("grpo",)),
    "mask_truncated": ("grpo", "sft", "dpo"),
    "max_sampler_weight": ("grpo", "distill"),
    "max_staleness": ("grpo", "distill"),
    "reference_step": ("grpo", "dpo"),
    "min_reward": ("sft",),
    "dpo_beta": ("dpo",),
    "teacher": ("distill",),
}
"""The methods that use a setting; all use the others."""
