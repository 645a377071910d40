"""Measure how much of an update reaches an engine whose merged weights have 16 bits.

    python benchmarks/arrival.py --json

SmolLM2-135M answers addition questions and is trained on its answers, one step at learning rates 5e-5 and
5e-4, and five steps at 5e-4. Each result is exported twice, rounded to nearest and stochastically, and
compared with the trainer:

- `share`: ⟨published - base, ΔW⟩ / ⟨ΔW, ΔW⟩ over all adapted weights;
- `applied`: the same of log-probabilities, as the probe computes it;
- `mean_abs`: mean |Δlogprob| between the published model and the trainer, per sampled token;
  `mean_abs_before` is the same of the base model.

The trainer computes in float32. The published model is Transformers' in bfloat16, in place of an engine.

`heads` compares the two on unchanged weights, both in bfloat16, with an output head that keeps its logits in
bfloat16 or in float32 on both sides.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent.parent))

from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.backend.plan.compute import this_cpu
from insitu.backend.serving.probe import compare
from insitu.testing.models import smollm2
from insitu.training.model import export
from insitu.training.model import logprobs as head_of_trainer
from insitu.types import LoraSettings, StepSettings, TrainingSequence
from tests.support.addition import MAX_TOKENS, question
from tests.support.sequences import make_sequence, train

NUM_QUESTIONS, GROUP_SIZE = 4, 3
CASES = [(5e-5, 1), (5e-4, 1), (5e-4, 5)]
"""Learning rate and number of steps."""
ROUNDINGS = ("nearest", "stochastic")
RUN = "arrival"


@dataclass(frozen=True)
class Answers:
    """Sampled sequences, and where each answer starts."""

    ids: list[list[int]]
    starts: list[int]

    def sampled(self, rows: list[list[float]]) -> list[list[float]]:
        """Keep the log-probabilities of sampled tokens, of scores from the second token on."""
        return [row[start - 1 :] for row, start in zip(rows, self.starts, strict=True)]


def sample(model_dir: Path) -> Answers:
    """Sample several answers to every question from the base model."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    generator, end, ids, starts = random.Random(0), tokenizer.eos_token_id, list[list[int]](), list[int]()
    torch.manual_seed(0)
    for _ in range(NUM_QUESTIONS):
        asked = [{"role": "user", "content": question(generator)[0]}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        rows = model.generate(
            torch.tensor([prompt] * GROUP_SIZE),
            attention_mask=torch.ones(GROUP_SIZE, len(prompt), dtype=torch.long),
            do_sample=True,
            top_k=0,
            max_new_tokens=MAX_TOKENS,
            pad_token_id=end,
        )
        for row in rows.tolist():
            answer = row[len(prompt) :]
            length = answer.index(end) + 1 if end in answer else len(answer)
            ids.append(prompt + answer[:length])
            starts.append(len(prompt))
    return Answers(ids, starts)


def to_sequences(answers: Answers, scores: list[list[float]]) -> list[TrainingSequence]:
    """Give the answers random advantages: an update's size matters here, not what it teaches."""
    generator = random.Random(1)
    made: list[TrainingSequence] = []
    for number, (ids, start, row) in enumerate(zip(answers.ids, answers.starts, scores, strict=True)):
        mask = [int(place >= start) for place in range(len(ids))]
        logprobs = [0.0] * start + row[start - 1 :]
        made.append(make_sequence(f"rollout-{number}", ids, mask, logprobs, generator.uniform(-1, 1)))
    return made


@torch.no_grad()
def score(model_dir: Path, ids: list[list[int]], head: str = "bfloat16") -> list[list[float]]:
    """Score like an engine: every product in bfloat16 but perhaps the head's, the softmax in float32."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    padded = pad_sequence([torch.tensor(each) for each in ids], batch_first=True)
    hidden = model.base_model(padded).last_hidden_state[:, :-1]
    logits = LOGITS[head](hidden.flatten(0, 1), model.lm_head.weight, None).unflatten(0, hidden.shape[:2])
    logprobs = logits.log_softmax(-1).gather(-1, padded[:, 1:, None])[..., 0].tolist()
    return [row[: len(each) - 1] for row, each in zip(logprobs, ids, strict=True)]


def wide_logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute what a GPU does with `torch.mm(…, out_dtype=torch.float32)`."""
    with torch.autocast("cpu", enabled=False):
        return functional.linear(hidden.float(), weight.float(), bias)


def narrow_logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return functional.linear(hidden, weight, bias).float()


LOGITS = {"bfloat16": narrow_logits, "float32": wide_logits}


def heads(model_dir: Path, answers: Answers, threads: int) -> dict[str, float]:
    """Return mean |Δlogprob| of the engine and a trainer in bfloat16, by the head's precision."""
    rank = TrainerRank(0, 1, "", 0, str(model_dir), "bfloat16", threads)
    rank.open_run(RUN, LoraSettings(rank=8, alpha=16))
    found: dict[str, float] = {}
    for head, logits in LOGITS.items():
        with mock.patch.object(head_of_trainer, "float32_logits", logits):
            trainer = answers.sampled(rank.score(RUN, answers.ids))
        engine = answers.sampled(score(model_dir, answers.ids, head))
        found[head] = compare(trainer, trainer, engine, engine).mean_abs
    return found


@contextmanager
def rounding(kind: str) -> Iterator[None]:
    """Export with this kind of rounding; `stochastic` is what the trainer does."""
    if kind == "stochastic":
        yield
        return
    with mock.patch.object(export, "round_stochastically", lambda values, dtype, _seed: values.to(dtype)):
        yield


def share(base: dict[str, torch.Tensor], exact: Path, published: Path) -> float:
    """Return the share of ΔW that is in the published weights."""
    wanted, got = (load_file(path / export.ADAPTED_FILE) for path in (exact, published))
    arrived = energy = 0.0
    for name, whole in wanted.items():
        change = whole - base[name].float()
        arrived += torch.sum((got[name].float() - base[name].float()) * change, dtype=torch.float64).item()
        energy += torch.sum(change * change, dtype=torch.float64).item()
    return arrived / energy


def measure(model_dir: Path, answers: Answers, threads: int, scratch: Path) -> list[dict[str, Any]]:
    rank = TrainerRank(0, 1, "", 0, str(model_dir), "float32", threads)
    base = load_file(model_dir / "model.safetensors")
    engine_before = answers.sampled(score(model_dir, answers.ids))
    rows: list[dict[str, Any]] = []
    for rate, num_steps in CASES:
        rank.open_run(RUN, LoraSettings(rank=8, alpha=16))
        scores = rank.score(RUN, answers.ids)
        sequences, trainer_before = to_sequences(answers, scores), answers.sampled(scores)
        untrained = compare(trainer_before, trainer_before, engine_before, engine_before)
        for _ in range(num_steps):
            train(rank, RUN, sequences, StepSettings(learning_rate=rate))
        trainer_after = answers.sampled(rank.score(RUN, answers.ids))
        exact = scratch / "exact"
        rank.export_merged(RUN, str(exact), "float32")
        for kind in ROUNDINGS:
            published = scratch / kind
            with rounding(kind):
                seconds = rank.export_merged(RUN, str(published), "bfloat16")["time/export_seconds"]
            engine_after = answers.sampled(score(published, answers.ids))
            probe = compare(trainer_before, trainer_after, engine_before, engine_after)
            rows.append(
                {
                    "learning_rate": rate,
                    "steps": num_steps,
                    "rounding": kind,
                    "share": share(base, exact, published),
                    "applied": probe.applied,
                    "mean_abs": probe.mean_abs,
                    "mean_abs_before": untrained.mean_abs,
                    "tokens": probe.num_tokens,
                    "export_seconds": seconds,
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    answers = sample(smollm2())
    by_head = heads(smollm2(), answers, options.threads)
    print(json.dumps({"heads": by_head}), file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="insitu-arrival-") as scratch:
        rows = measure(smollm2(), answers, options.threads, Path(scratch))
    if options.json:
        engine = "transformers-bfloat16"
        print(json.dumps({"rows": rows, "heads": by_head, "engine": engine, "cpu": this_cpu()}))
        return
    for row in rows:
        print(
            f"{row['learning_rate']:g} × {row['steps']} {row['rounding']:<10} share {row['share']:.3f} "
            f"applied {row['applied']:.2f} mean |Δlogprob| {row['mean_abs']:.3f}"
        )


if __name__ == "__main__":
    main()
