"""One side of `trainer.py` in a process of its own: insitu, a bare torch loop, or TRL.

    python benchmarks/trainer_sides.py insitu|bare|trl|trl_installed FOLDER DTYPE THREADS

Started by `trainer.py`, which reads a line of JSON when the side is loaded and one for every line it sends.
All sides start from the calls and the adapter that `trainer_data.py` left in FOLDER. A side's first step
leaves its clipped gradient in FOLDER/gradient-SIDE.safetensors: AdamW's running mean, a tenth of it.

Shape suffixes as in `insitu.training.batching`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trainer_data import LORA, NUM_ROLLOUTS, SETTINGS, Calls, packed, read_calls, sequences_of
from transformers import AutoModelForCausalLM

from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.testing.models import smollm2
from insitu.training.batching import MicroBatch, collate
from insitu.training.objective import objective_of

TRL_ROWS = 8  # TRL's default batch, accumulated over a step

Step = Callable[[], float]
"""One step; returns the norm of its gradient before clipping."""
Means = Callable[[], dict[str, Tensor]]
"""AdamW's running means, by the names that PEFT gives to tensors in files."""


# ── insitu ──────────────────────────────────────────────────────────────────────────────────────────────


def insitu_side(folder: Path, dtype: str, threads: int) -> tuple[Step, Means]:
    """Run insitu's step; everything after the recorded calls is timed."""
    rank = TrainerRank(0, 1, "", 0, str(smollm2()), dtype, threads)
    rank.open_run("bench", LORA, str(folder / "start"))
    rollouts = read_calls(folder)

    def step() -> float:
        return rank.train_step("bench", packed(rollouts).rank_batch(0), SETTINGS)["grad_norm"]

    def means() -> dict[str, Tensor]:
        rank.save("bench", str(folder / "after"))
        moments = load_file(folder / "after" / "optimizer.safetensors")
        prefix = "exp_avg."
        return {name.removeprefix(prefix): mean for name, mean in moments.items() if name.startswith(prefix)}

    return step, means


# ── the stock model of the other two ────────────────────────────────────────────────────────────────────


def stock_model(folder: Path) -> Any:
    """Load stock Transformers and PEFT with the adapter that all sides start from."""
    base = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32)
    config = LoraConfig(
        r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model: Any = get_peft_model(base, config)
    set_peft_model_state_dict(model, load_file(folder / "start" / "adapter" / "adapter_model.safetensors"))
    return model


def stock_means(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name.replace(".default", ""): optimizer.state[p]["exp_avg"] for name, p in trained.items()}


# ── bare ────────────────────────────────────────────────────────────────────────────────────────────────


def dense_mask(batch: MicroBatch) -> Tensor:
    """Turn the tree into an additive 4-D mask, the form that SDPA computes fastest."""
    assert batch.end_bl is not None
    place_l, end_l = torch.arange(batch.end_bl.shape[1]), batch.end_bl[0]
    visible_ll = (place_l[None, :] <= place_l[:, None]) & (place_l[:, None] < end_l[None, :])
    return torch.zeros(visible_ll.shape).masked_fill_(~visible_ll, float("-inf"))[None, None]


def bare_side(folder: Path, dtype: str, threads: int) -> tuple[Step, Means]:
    """Run a handwritten loop over insitu's packed rows; packing and masks are not timed."""
    torch.set_num_threads(threads)
    model = stock_model(folder)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=SETTINGS.learning_rate, weight_decay=0.0)
    objective = objective_of(SETTINGS)
    batches = [collate(part) for part in packed(read_calls(folder)).rank_batch(0).parts()]
    rows = [(batch, dense_mask(batch)) for batch in batches]

    def step() -> float:
        for batch, mask in rows:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                logits_uv = model(
                    input_ids=batch.ids_bl,
                    position_ids=batch.depth_bl,
                    attention_mask=mask,
                    logits_to_keep=batch.predictor_u,
                    use_cache=False,
                ).logits[0]
            logprobs_uv = torch.log_softmax(logits_uv.float(), -1)
            new_t = logprobs_uv.gather(-1, batch.target_u[:, None])[:, 0][batch.pick_t]
            ratio_t = torch.exp(new_t - new_t.detach())
            clipped_t = ratio_t.clamp(1 - objective.clip_low, 1 + objective.clip_high)
            loss_t = -torch.min(ratio_t * batch.advantage_t, clipped_t * batch.advantage_t)
            (loss_t * batch.weight_t).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, SETTINGS.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    return step, lambda: stock_means(model, optimizer)


# ── TRL ─────────────────────────────────────────────────────────────────────────────────────────────────


def trl_inputs(rollouts: Calls) -> list[dict[str, Tensor]]:
    """Lay out a row for each rollout, padded as TRL's trainer pads; `TRL_ROWS` rows at a time.

    The turns of a rollout extend each other, so they are one row; its tool mask hides what the tools said.
    """
    sequences = sequences_of(rollouts)
    num_sampled = sum(int(sequence.mask.sum()) for sequence in sequences)
    batches: list[dict[str, Tensor]] = []
    for first in range(0, len(sequences), TRL_ROWS):
        part = sequences[first : first + TRL_ROWS]
        starts = [int(sequence.mask.argmax()) for sequence in part]  # the first sampled token
        ids = [torch.from_numpy(sequence.token_ids).long() for sequence in part]
        sampled = [torch.from_numpy(sequence.mask).long() for sequence in part]
        prompts = [row[:start] for row, start in zip(ids, starts, strict=True)]
        completions = [row[start:] for row, start in zip(ids, starts, strict=True)]
        batches.append(
            {
                "prompt_ids": _padded(prompts, "left"),
                "prompt_mask": _padded([torch.ones_like(row) for row in prompts], "left"),
                "completion_ids": _padded(completions, "right"),
                "completion_mask": _padded([torch.ones_like(row) for row in completions], "right"),
                "tool_mask": _padded([m[start:] for m, start in zip(sampled, starts, strict=True)], "right"),
                "advantages": torch.tensor([float(s.advantages[s.mask][0]) for s in part]),
                "num_items_in_batch": torch.tensor(num_sampled),
            }
        )
    return batches


def _padded(rows: list[Tensor], side: Literal["left", "right"]) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_side=side)


def trl_installed_side(folder: Path, dtype: str, threads: int) -> tuple[Step, Means]:
    """Use TRL's own settings: recompute activations to save memory, run the head at every position."""
    return trl_side(folder, dtype, threads, installed=True)


def trl_side(folder: Path, dtype: str, threads: int, installed: bool = False) -> tuple[Step, Means]:
    """Use GRPOTrainer's own loss, autocast, clipping and optimizer, without its work between steps.

    It gets what is fastest here: no checkpointing, and the head at the sampled tokens only, as on a GPU.
    """
    import trl.trainer.utils as trl_utils
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    if not installed:
        patched: Any = trl_utils
        patched._use_triton = lambda _device: True  # decides there which positions are scored, no more
    torch.set_num_threads(threads)
    objective, batches = objective_of(SETTINGS), trl_inputs(read_calls(folder))
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=dtype == "bfloat16",
        gradient_checkpointing=installed,
        per_device_train_batch_size=TRL_ROWS,
        gradient_accumulation_steps=len(batches),
        num_generations=NUM_ROLLOUTS,
        learning_rate=SETTINGS.learning_rate,
        weight_decay=0.0,
        max_grad_norm=SETTINGS.max_grad_norm,
        loss_type="dapo",
        epsilon=objective.clip_low,
        epsilon_high=objective.clip_high,
        beta=0.0,
        report_to="none",
    )
    trainer: Any = GRPOTrainer(
        model=stock_model(folder),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["-"] * TRL_ROWS * len(batches)}),
        processing_class=AutoTokenizer.from_pretrained(smollm2()),
    )
    trainer.current_gradient_accumulation_steps = len(batches)
    model = trainer.model.train()
    optimizer = trainer.create_optimizer()
    trained = [p for p in model.parameters() if p.requires_grad]

    def step() -> float:
        for inputs in batches:
            trainer.accelerator.backward(trainer.compute_loss(model, inputs))
        norm = trainer.accelerator.clip_grad_norm_(trained, arguments.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    return step, lambda: stock_means(model, optimizer)


# ── the process ─────────────────────────────────────────────────────────────────────────────────────────

SIDES: dict[str, Callable[[Path, str, int], tuple[Step, Means]]] = {
    "insitu": insitu_side,
    "bare": bare_side,
    "trl": trl_side,
    "trl_installed": trl_installed_side,
}


def peak_mib() -> float:
    """Return the peak resident memory since the last reset."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def serve(side: str, folder: Path, dtype: str, threads: int) -> None:
    """Run a step for every line read, until there are no more."""
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print

    def answer(**figures: float) -> None:
        print(json.dumps(figures), file=answers, flush=True)

    step, means = SIDES[side](folder, dtype, threads)
    Path("/proc/self/clear_refs").write_text("5")  # loading does not count
    answer(loaded_mib=peak_mib())
    for number, _ in enumerate(sys.stdin):
        started = time.perf_counter()
        norm = step()
        figures = {"seconds": time.perf_counter() - started, "grad_norm": norm, "peak_mib": peak_mib()}
        if number == 0:
            gradients = {name: mean.detach().contiguous() for name, mean in means().items()}
            save_file(gradients, folder / f"gradient-{side}.safetensors")
        answer(**figures)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("dtype")
    parser.add_argument("threads", type=int)
    given = parser.parse_args()
    serve(given.side, given.folder, given.dtype, given.threads)


if __name__ == "__main__":
    main()
