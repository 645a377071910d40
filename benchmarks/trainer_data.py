"""The training data of `trainer.py`, and the adapter it starts from.

    python benchmarks/trainer_data.py WORKLOAD FOLDER THREADS

writes FOLDER/calls.json, FOLDER/tokens.json and the checkpoint FOLDER/start.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.records.call_tokens import call_tokens
from insitu.testing.models import smollm2
from insitu.training.advantage import group_advantages
from insitu.training.objective import objective_of, shares_of
from insitu.training.packing import Packing, pack
from insitu.training.sequences import build_sequences
from insitu.types import LoraSettings, ModelCall, StepSettings, TrainingSequence

NUM_ROLLOUTS, VOCABULARY = 8, 49_152
WORKLOADS = {"prompt": (400, 1, 40, 0), "turns": (150, 4, 40, 40)}
"""Tokens of the prompt that all rollouts share, turns, sampled tokens of a turn, tool tokens after it."""
# No weights against the sampler: TRL needs another forward pass for them, the others get them for free.
SETTINGS = StepSettings(learning_rate=1e-5, loss="dapo", max_sampler_weight=None)
LORA = LoraSettings(rank=8, alpha=16)
MICRO_BATCH_TOKENS = 2048
"""The trainer's default."""

Calls = list[list[ModelCall]]
"""One list per rollout."""


def make_calls(workload: str) -> Calls:
    """Make calls of random tokens: only the prompt is shared."""
    generator = random.Random(0)

    def some(count: int) -> list[int]:
        return [generator.randrange(100, VOCABULARY) for _ in range(count)]

    num_prompt, num_turns, num_sampled, num_tool = WORKLOADS[workload]
    prompt, rollouts = some(num_prompt), list[list[ModelCall]]()
    for number in range(NUM_ROLLOUTS):
        history, calls = list(prompt), list[ModelCall]()
        for turn in range(num_turns):
            ids, rollout = some(num_sampled), f"rollout-{number}"
            calls.append(
                ModelCall(f"{rollout}-{turn}", rollout, "m", "m", 0, "0", list(history), ids, [], "stop")
            )
            history += ids + some(num_tool)
        rollouts.append(calls)
    return rollouts


def prepare(workload: str, folder: Path, threads: int) -> None:
    """Make an adapter whose weights all have a gradient (a fresh one has B = 0), and calls with logprobs."""
    rank = TrainerRank(0, 1, "", 0, str(smollm2()), "float32", threads)
    rank.open_run("bench", LORA)
    rank.save("bench", str(folder / "start"))
    path, noise = folder / "start" / "adapter" / "adapter_model.safetensors", torch.Generator().manual_seed(0)
    weights = load_file(path)
    for name in [name for name in weights if "lora_B" in name]:
        weights[name] = torch.randn(weights[name].shape, generator=noise) * 0.01
    save_file(weights, path, metadata={"format": "pt"})
    rank.open_run("bench", LORA, str(folder / "start"))
    rollouts: Calls = []
    for calls in make_calls(workload):
        (scores,) = rank.score("bench", [calls[-1].prompt_ids + calls[-1].output_ids])
        scored: list[ModelCall] = []
        for call in calls:
            first = len(call.prompt_ids) - 1
            own = torch.tensor(scores[first : first + len(call.output_ids)])
            sampler = own + 0.01 * torch.randn(own.shape, generator=noise)
            scored.append(replace(call, logprobs=sampler.tolist()))
        rollouts.append(scored)
    (folder / "calls.json").write_text(json.dumps([[asdict(call) for call in calls] for calls in rollouts]))
    (folder / "tokens.json").write_text(json.dumps(count_tokens(rollouts)))


def count_tokens(rollouts: Calls) -> dict[str, int]:
    """Count tokens: sampled, stored in all calls, and computed by either way of batching."""
    every = [call for calls in rollouts for call in calls]
    rows = [len(sequence.token_ids) for sequence in sequences_of(rollouts)]
    return {
        "sampled": sum(len(call.output_ids) for call in every),
        "calls": sum(len(call.prompt_ids) + len(call.output_ids) for call in every),
        "packed": packed(rollouts).num_computed_tokens,
        "padded": len(rows) * max(rows),
    }


def read_calls(folder: Path) -> Calls:
    return [
        [ModelCall(**call) for call in calls] for calls in json.loads((folder / "calls.json").read_text())
    ]


def advantages() -> list[float]:
    return [each for (each,) in group_advantages([[random.Random(i).random()] for i in range(NUM_ROLLOUTS)])]


def sequences_of(rollouts: Calls) -> list[TrainingSequence]:
    sequences: list[TrainingSequence] = []
    for number, (calls, advantage) in enumerate(zip(rollouts, advantages(), strict=True)):
        sequences += build_sequences(
            [call_tokens(call) for call in calls], f"rollout-{number}", [advantage] * len(calls)
        )[0]
    return sequences


def packed(rollouts: Calls) -> Packing:
    """Pack the rollouts as the trainer does."""
    return pack(shares_of(sequences_of(rollouts), objective_of(SETTINGS), SETTINGS), MICRO_BATCH_TOKENS, 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("threads", type=int)
    given = parser.parse_args()
    prepare(given.workload, given.folder, given.threads)


if __name__ == "__main__":
    main()
