"""Our loss and its gradient against TRL's own `GRPOTrainer`, for the losses that both have.

TRL computes its side itself: rollouts go in through its `rollout_func`, and from rewards, masks and logprobs
on everything is its code (advantages, importance weights, shuffling into micro-batches, normalisers, loss).
Only the log-probabilities that its model would give are replaced, by the same numbers that our side gets.

Suffixes: n rollouts of the step, w padded length, t sampled tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from insitu.training.advantage import group_advantages
from insitu.training.batching import MicroBatch, collate
from insitu.training.objective import objective_of, shares_of
from insitu.training.packing import pack
from insitu.training.passes import Passes
from insitu.types import StepSettings
from tests.support.sequences import make_sequence, parts_of

EQUAL = 1e-5
NUM_GROUPS, GROUP_SIZE = 3, 4
NUM_ROLLOUTS = NUM_GROUPS * GROUP_SIZE
MAX_LENGTH = 9
CAP = 2.0
PROMPT = [2, 3]
_FIRST_ID = 10
"""The first token of a rollout is this plus the rollout's number, so that it is found after shuffling."""
pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Rollouts:
    """What was sampled in one step and what three policies think of it."""

    ids: list[list[int]]
    mask: list[list[int]]
    """0 for what a tool said in between."""
    rewards: list[float]
    sampler_nw: Tensor
    old_nw: Tensor
    new_nw: Tensor
    reference_nw: Tensor


def some_rollouts(spread: float = 0.4) -> Rollouts:
    """Random rollouts; `spread` is how far the policies are apart."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, MAX_LENGTH + 1, (NUM_ROLLOUTS,), generator=generator).tolist()
    mask = [[1, *torch.randint(0, 4, (n - 1,), generator=generator).clamp(max=1).tolist()] for n in lengths]

    def near(center_nw: Tensor, far: float) -> Tensor:
        return center_nw + far * torch.randn(NUM_ROLLOUTS, MAX_LENGTH, generator=generator)

    sampler_nw = near(torch.full((NUM_ROLLOUTS, MAX_LENGTH), -3.0), 0.7)
    old_nw = near(sampler_nw, 0.8)  # far enough for the cap of the importance weights to matter
    return Rollouts(
        ids=[[_FIRST_ID + number] + [5] * (length - 1) for number, length in enumerate(lengths)],
        mask=mask,
        rewards=torch.randn(NUM_ROLLOUTS, generator=generator).tolist(),
        sampler_nw=sampler_nw,
        old_nw=old_nw,
        new_nw=near(old_nw, spread),
        reference_nw=near(old_nw, 0.5),
    )


@dataclass(frozen=True)
class Theirs:
    """TRL's answer: loss of the step, its gradient by new logprobs, advantages."""

    loss: float
    gradient_nw: Tensor
    advantages: list[float]


def trl_loss(
    rollouts: Rollouts, folder: Path, model_dir: Path, *, sampler_weights: bool, **config: Any
) -> Theirs:
    """The whole step by TRL, in two accumulated micro-batches of its own shuffling."""
    leaf_nw = rollouts.new_nw.clone().requires_grad_()
    rows = [{"prompt": f"w{number // GROUP_SIZE}"} for number in range(NUM_ROLLOUTS)]
    trainer = _trl_trainer(rollouts, leaf_nw, rows, model_dir, _trl_arguments(folder, **config))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    # An engine is only used to sample, which `rollout` does; its importance weights are TRL's own code.
    trainer.use_vllm, trainer._last_loaded_step = sampler_weights, trainer.state.global_step
    total = torch.zeros(())
    for trainer._step in range(2):
        loss = trainer._compute_loss(trainer.model, trainer._prepare_inputs(rows))
        loss.backward()
        total += loss.detach()
    assert leaf_nw.grad is not None
    return Theirs(total.item(), leaf_nw.grad, list(trainer._logs["advantages"])[:NUM_ROLLOUTS])


def _trl_arguments(folder: Path, **config: Any) -> Any:
    from trl.trainer.grpo_config import GRPOConfig  # here and below: TRL takes seconds to import

    return GRPOConfig(
        str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        per_device_train_batch_size=NUM_ROLLOUTS // 2,
        gradient_accumulation_steps=2,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_LENGTH,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=CAP,
        **({"scale_rewards": "none", "num_iterations": 2} | config),
    )


def _trl_trainer(
    rollouts: Rollouts, leaf_nw: Tensor, rows: list[dict[str, str]], model_dir: Path, arguments: Any
) -> Any:
    """A real trainer that is told what was sampled and what its model, then and now, makes of it."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl.trainer.grpo_trainer import GRPOTrainer

    def given(trainer: Any, model: Any, input_ids: Tensor, _mask: Tensor, keep: int, **options: Any) -> Any:
        table_nw = leaf_nw if options.get("compute_entropy") else rollouts.old_nw
        table_nw = rollouts.reference_nw if model is trainer.ref_model else table_nw
        logprobs = table_nw[input_ids[:, -keep] - _FIRST_ID, :keep]
        return logprobs, torch.zeros_like(logprobs), None

    def rollout(prompts: list[str], _trainer: Any) -> dict[str, Any]:
        given = zip(rollouts.sampler_nw, rollouts.ids, strict=True)
        return {
            "prompt_ids": [PROMPT] * len(prompts),
            "completion_ids": rollouts.ids,
            "logprobs": [row[: len(ids)].tolist() for row, ids in given],
            "env_mask": rollouts.mask,
        }

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(97)}, unk_token="w0"))
    kind: Any = type("Given", (GRPOTrainer,), {"_get_per_token_logps_and_entropies": given})
    return kind(
        str(model_dir),
        lambda completions, **_: rollouts.rewards,
        arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1"),
        rollout_func=rollout,
    )


def our_loss(rollouts: Rollouts, settings: StepSettings, *, again: bool = True) -> tuple[float, Tensor]:
    """(loss, gradient) of the first or a second pass over the rollouts, packed into small micro-batches."""
    objective = objective_of(settings)
    advantages = [
        advantage
        for start in range(0, NUM_ROLLOUTS, GROUP_SIZE)
        for (advantage,) in group_advantages(
            [[reward] for reward in rollouts.rewards[start : start + GROUP_SIZE]], objective.advantage
        )
    ]
    sequences = [
        make_sequence(
            str(number),
            PROMPT + ids,
            [0] * len(PROMPT) + rollouts.mask[number],
            [0.0] * len(PROMPT) + rollouts.sampler_nw[number, : len(ids)].tolist(),
            advantages[number],
        )
        for number, ids in enumerate(rollouts.ids)
    ]
    packing = pack(shares_of(sequences, objective, settings), 24, 1)
    batches = [collate(part) for part in parts_of(packing)]
    assert len(batches) > 1
    passes = Passes(batches, NUM_ROLLOUTS, objective, settings, lambda _: None, 1.0)
    leaf_nw = rollouts.new_nw.clone().requires_grad_()

    def look_up(table_nw: Tensor) -> Any:
        def score(batch: MicroBatch) -> tuple[Tensor, Tensor]:
            given_t = table_nw[batch.rollout_t, _columns(batch, rollouts)]
            return given_t, torch.zeros_like(given_t)

        return score

    if again:
        passes.run(look_up(rollouts.old_nw.clone().requires_grad_()), look_up(rollouts.reference_nw))
    sums = passes.run(look_up(leaf_nw), look_up(rollouts.reference_nw))
    assert leaf_nw.grad is not None
    return sums["loss"], leaf_nw.grad


def _columns(batch: MicroBatch, rollouts: Rollouts) -> list[int]:
    """Where in its rollout each token of the batch is: tokens of a rollout come in their order."""
    sampled = [iter([i for i, flag in enumerate(mask) if flag]) for mask in rollouts.mask]
    return [next(sampled[number]) for number in batch.rollout_t.tolist()]


LOSSES: dict[str, tuple[StepSettings, dict[str, Any]]] = {
    "grpo": (StepSettings(loss="grpo"), {"loss_type": "grpo", "epsilon": 0.2}),
    "grpo, clip higher": (
        StepSettings(loss="grpo", clip_low=0.1, clip_high=0.4),
        {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.4},
    ),
    "dr_grpo": (
        StepSettings(loss="dr_grpo", max_rollout_tokens=MAX_LENGTH),
        {"loss_type": "dr_grpo", "epsilon": 0.2},
    ),
    "dapo": (StepSettings(loss="dapo"), {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}),
    "gspo": (
        StepSettings(loss="gspo", clip_low=0.05, clip_high=0.1),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.1},
    ),
    # TRL clips the weight at epsilon_high, we at 1 + clip_high.
    "cispo": (StepSettings(loss="cispo", clip_high=0.3), {"loss_type": "cispo", "epsilon_high": 1.3}),
}


@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("sampler_weights", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradient_are_trls(
    loss: str, sampler_weights: bool, beta: float, model_dir: Path, tmp_path: Path
) -> None:
    settings, config = LOSSES[loss]
    # TRL's `scale_rewards="none"` is our advantage `mean`; the constants under its standard deviation differ.
    settings = replace(
        settings, advantage="mean", beta=beta, max_sampler_weight=CAP if sampler_weights else None
    )
    rollouts = some_rollouts()
    theirs = trl_loss(rollouts, tmp_path, model_dir, sampler_weights=sampler_weights, beta=beta, **config)
    ours, gradient_nw = our_loss(rollouts, settings)
    assert theirs.gradient_nw.abs().max() > 1e-3
    assert abs(ours - theirs.loss) <= EQUAL
    if loss == "gspo" and (sampler_weights or beta):
        # TRL gives every token of a rollout the mean of their importance weights and KLs, we to each its own.
        theirs_n, ours_n = theirs.gradient_nw.sum(-1), gradient_nw.sum(-1)
        assert (ours_n - theirs_n).abs().max() <= EQUAL
        return
    assert (gradient_nw - theirs.gradient_nw).abs().max() <= EQUAL


@pytest.mark.parametrize("loss", LOSSES)
def test_the_first_pass_is_trls(loss: str, model_dir: Path, tmp_path: Path) -> None:
    """Before any update the policy is its own old one: ratios of 1 that still carry the gradient."""
    settings, config = LOSSES[loss]
    settings = replace(settings, advantage="mean", max_sampler_weight=None)
    rollouts = some_rollouts()
    once = config | {"num_iterations": 1}
    theirs = trl_loss(rollouts, tmp_path, model_dir, sampler_weights=False, **once)
    ours, gradient_nw = our_loss(rollouts, settings, again=False)
    assert theirs.gradient_nw.abs().max() > 1e-3
    assert abs(ours - theirs.loss) <= EQUAL
    assert (gradient_nw - theirs.gradient_nw).abs().max() <= EQUAL


@pytest.mark.parametrize(("kind", "scale"), [("mean", "none"), ("std", "group")])
def test_advantages_are_trls(kind: Any, scale: str, model_dir: Path, tmp_path: Path) -> None:
    """TRL adds 1e-4 to the standard deviation, we 1e-6: on rewards in the hundreds that is no difference."""
    rollouts = some_rollouts()
    rollouts = replace(rollouts, rewards=[300.0 * reward for reward in rollouts.rewards])
    theirs = trl_loss(
        rollouts, tmp_path, model_dir, sampler_weights=False, loss_type="grpo", scale_rewards=scale
    )
    starts = range(0, NUM_ROLLOUTS, GROUP_SIZE)
    returns = [[reward] for reward in rollouts.rewards]
    ours = [a for i in starts for (a,) in group_advantages(returns[i : i + GROUP_SIZE], kind)]
    assert theirs.advantages == pytest.approx(ours, rel=EQUAL, abs=EQUAL)
