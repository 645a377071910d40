"""Ten recorded batches through insitu and through TRL's own `GRPOTrainer.train`: the same adapter comes out.

A batch is what a gateway records: calls of several turns, whose prompts repeat the turns before. Our side
reads them from the record store. TRL gets one row per rollout, with the mask of what it sampled; rewards,
advantages, loss, clipping and AdamW are its own code, on stock Transformers and PEFT.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from insitu.backend.batch import make_batch
from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.records.store import RecordStore
from insitu.types import LoraSettings, ModelCall, StepSettings, Trajectory, TrajectoryGroup
from tests.support.sequences import train

NUM_BATCHES, NUM_GROUPS, GROUP_SIZE = 10, 3, 4
NUM_ROLLOUTS = NUM_GROUPS * GROUP_SIZE
RATE = 1e-3
LORA = LoraSettings(rank=4, alpha=8, seed=3)
AGREEMENT = 1e-3
pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Rollout:
    """One rollout: its calls as they were recorded, and the row that they are to TRL."""

    calls: list[ModelCall]
    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    """0 for what a tool said between the turns."""
    reward: float


def recorded_batches() -> list[list[Rollout]]:
    """Rollouts of one to three turns; the rewards of every group differ."""
    rng = random.Random(5)

    def some(least: int, most: int) -> list[int]:
        return [rng.randrange(2, 97) for _ in range(rng.randint(least, most))]

    batches: list[list[Rollout]] = []
    for batch in range(NUM_BATCHES):
        rollouts: list[Rollout] = []
        for group in range(NUM_GROUPS):
            prompt = some(3, 9)
            rewards = rng.sample([0.0, 0.25, 0.5, 0.75, 1.0], GROUP_SIZE)
            for number, reward in enumerate(rewards):
                name, row, mask = f"b{batch}.{group}.{number}", list[int](), list[int]()
                calls: list[ModelCall] = []
                for turn in range(rng.randint(1, 3)):
                    output, tool = some(2, 6), some(1, 4)
                    call = f"{name}-{turn}"
                    made = (prompt + row, output, [-4.0] * len(output), "stop")
                    calls.append(ModelCall(call, name, "run", "run", batch, f"run@{batch}", *made))
                    row, mask = row + output + tool, mask + [1] * len(output) + [0] * len(tool)
                last = len(mask) - mask[::-1].index(1)  # no row ends with what a tool said
                rollouts.append(Rollout(calls, prompt, row[:last], mask[:last], reward))
        batches.append(rollouts)
    return batches


def our_adapter(
    batches: list[list[Rollout]], rank: TrainerRank, settings: StepSettings, folder: Path
) -> dict[str, Tensor]:
    records = RecordStore(f"sqlite:///{folder / 'calls.db'}")
    for step, batch in enumerate(batches):
        records.append([call for rollout in batch for call in rollout.calls])
        rated = [
            Trajectory(rollout.calls[0].rollout_id, [call.id for call in rollout.calls], rollout.reward)
            for rollout in batch
        ]
        groups = [
            TrajectoryGroup(f"{step}-{start}", "run", rated[start : start + GROUP_SIZE])
            for start in range(0, NUM_ROLLOUTS, GROUP_SIZE)
        ]
        made = make_batch(groups, records, settings, step)
        assert len(made.sequences) == NUM_ROLLOUTS, "the turns of a rollout are one sequence"
        metrics = train(rank, "run", made.sequences, settings)
        assert metrics["updated"] == 1
        assert metrics["num_computed_tokens"] < metrics["num_input_tokens"], "prompts are shared"
    records.close()
    rank.save("run", str(folder / "end"))
    return load_file(folder / "end" / "adapter" / "adapter_model.safetensors")


def trl_adapter(
    batches: list[list[Rollout]], start: Path, model_dir: Path, folder: Path, **config: Any
) -> dict[str, Tensor]:
    from datasets import Dataset  # here and below: they take seconds to import
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    lora = LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(base, lora)
    set_peft_model_state_dict(model, load_file(start / "adapter" / "adapter_model.safetensors"))
    left: Iterator[list[Rollout]] = iter(batches)
    now: list[Rollout] = []

    def recorded(prompts: list[str], _trainer: Any) -> dict[str, Any]:
        now[:] = next(left)
        assert len(prompts) == len(now)
        return {
            "prompt_ids": [rollout.prompt_ids for rollout in now],
            "completion_ids": [rollout.completion_ids for rollout in now],
            "logprobs": [[-4.0] * len(rollout.completion_ids) for rollout in now],
            "env_mask": [rollout.mask for rollout in now],
        }

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(97)}, unk_token="w0"))
    trainer = GRPOTrainer(
        model,
        lambda completions, **_: [rollout.reward for rollout in now],
        GRPOConfig(
            str(folder),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            max_steps=NUM_BATCHES,
            per_device_train_batch_size=NUM_ROLLOUTS // 2,
            gradient_accumulation_steps=2,
            num_generations=GROUP_SIZE,
            max_completion_length=64,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            **config,
        ),
        train_dataset=Dataset.from_list([{"prompt": f"w{n}"} for n in range(NUM_BATCHES * NUM_GROUPS)]),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1"),
        rollout_func=recorded,
    )
    trainer.train()
    assert next(left, None) is None, "TRL has not trained on all batches"
    return {name: tensor.detach() for name, tensor in get_peft_model_state_dict(model).items()}


def norm(tensors: dict[str, Tensor]) -> float:
    return float(sum(tensor.double().square().sum() for tensor in tensors.values())) ** 0.5


@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_ten_updates_give_the_adapter_of_trl(beta: float, model_dir: Path, tmp_path: Path) -> None:
    """With TRL's own loss, clip, KL and scaled rewards (it adds 1e-4 to the deviation, we 1e-6)."""
    batches = recorded_batches()
    rank = TrainerRank(0, 1, "127.0.0.1", 0, str(model_dir), "float32", 1, "cpu", 64)
    rank.open_run("run", LORA)
    rank.save("run", str(tmp_path / "start"))
    start = load_file(tmp_path / "start" / "adapter" / "adapter_model.safetensors")
    settings = StepSettings(
        learning_rate=RATE, loss="dapo", clip_low=0.2, clip_high=0.2, beta=beta, max_sampler_weight=None
    )
    ours = our_adapter(batches, rank, settings, tmp_path)
    theirs = trl_adapter(batches, tmp_path / "start", model_dir, tmp_path / "trl", beta=beta)
    assert ours.keys() == theirs.keys()
    moved = norm({name: ours[name] - start[name] for name in ours})
    apart = norm({name: ours[name] - theirs[name] for name in ours})
    print(f"moved {moved:.3e}, apart {apart:.3e}, ratio {apart / moved:.2e}")
    assert moved > 10 * RATE
    assert apart <= AGREEMENT * moved
