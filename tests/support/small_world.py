"""A group of rollouts sampled from a small random model in the process itself, with its records and witness.

Everything is real but the engine: a tokenizer, a chat template from an installed package, a model that
samples token by token. So what a guard says about altered data is said in seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from insitu.backend.batch import make_batch
from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.gateway.engines.routes import Target
from insitu.records.call_tokens import CallTokens
from insitu.types import LoraSettings, ModelCall, StepSettings, TrainingSequence, Trajectory, TrajectoryGroup
from tests.support.sequences import stored_whole
from tests.support.witness import Witnessed
from tests.support.zoo import SAYINGS, TEMPLATES

RUN, VERSION = "run", "run@3"
NUM_ROLLOUTS, NUM_TURNS, NUM_SAMPLED = 4, 2, 7
TARGET = Target(VERSION, RUN, 3, "base", VERSION)
Sequences = list[TrainingSequence]


@dataclass(frozen=True)
class World:
    """`witnessed` is the truth; the rest is what the project makes of it, and what mutations alter."""

    folder: Path
    tokenizer: Any
    model: Any
    """What samples, in plain Transformers."""
    witnessed: dict[str, list[Witnessed]]
    calls: dict[str, list[ModelCall]]
    answers: list[dict[str, Any]]
    """The engine's generate answers, one per call."""
    rewards: dict[str, float]
    tamper: Callable[[Sequences], Sequences] = list

    def sequences(self) -> Sequences:
        """What is trained on."""
        trajectories = [
            Trajectory(rollout, [call.id for call in calls], self.rewards[rollout])
            for rollout, calls in self.calls.items()
        ]
        group = TrajectoryGroup("group", RUN, trajectories)
        return self.tamper(make_batch([group], self, StepSettings(), 3).sequences)  # type: ignore[arg-type]

    def tokens(self, ids: Sequence[str]) -> dict[str, CallTokens]:
        """As a record store answers."""
        every = stored_whole([call for calls in self.calls.values() for call in calls])
        return {call_id: every[call_id] for call_id in ids}

    def every_call(self, change: Callable[[ModelCall], ModelCall]) -> World:
        """A world whose records were altered."""
        changed = {rollout: [change(call) for call in calls] for rollout, calls in self.calls.items()}
        return dataclasses.replace(self, calls=changed)

    def every_sequence(self, change: Callable[[TrainingSequence], TrainingSequence]) -> World:
        """A world whose training sequences are altered on the way."""
        return dataclasses.replace(self, tamper=lambda made: [change(sequence) for sequence in made])

    def trainer(self) -> TrainerRank:
        rank = TrainerRank(0, 1, "127.0.0.1", 0, str(self.folder), "float32", 1)
        rank.open_run(RUN, LoraSettings())
        return rank


def template_text(name: str) -> str:
    return next(template for template in TEMPLATES if template.name == name).text()


def build_tokenizer() -> Any:
    """Byte-level BPE with a few merges, trained on the spot."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    bare.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bare.train_from_iterator(
        [*SAYINGS, "the cat and the other cat then sat on the mat and that was that"], trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=bare, bos_token="<|im_start|>", eos_token="<|im_end|>")


def build_model(folder: Path, vocabulary_size: int, seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.4,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def build_world(folder: Path, seed: int = 0) -> World:
    """Four rollouts of two turns; the last token of every turn is the end-of-turn token."""
    tokenizer = build_tokenizer()
    model = build_model(folder, len(tokenizer), seed)
    template = template_text("template_chatml")
    witnessed: dict[str, list[Witnessed]] = {}
    calls: dict[str, list[ModelCall]] = {}
    answers: list[dict[str, Any]] = []
    generator = torch.Generator().manual_seed(seed)
    for number in range(NUM_ROLLOUTS):
        rollout, ids, messages = f"rollout-{number}", [], []
        for turn in range(NUM_TURNS):
            messages = [*messages, {"role": "user", "content": SAYINGS[turn]}]
            ids = _continued(tokenizer, template, messages, ids)
            output_ids, logprobs = sample(model, ids, tokenizer.eos_token_id, generator)
            seen = Witnessed(f"mc-{number}-{turn}", ids, output_ids, logprobs)
            witnessed.setdefault(rollout, []).append(seen)
            calls.setdefault(rollout, []).append(_record(rollout, seen, messages))
            answers.append(_answer(seen))
            messages = [*messages, {"role": "assistant", "content": "x"}]
            ids = ids + output_ids
    rewards = {rollout: float(number) for number, rollout in enumerate(calls)}
    return World(folder, tokenizer, model, witnessed, calls, answers, rewards)


def _continued(tokenizer: Any, template: str, messages: list[dict[str, str]], ids: list[int]) -> list[int]:
    """The prompt of the next call: what was sampled stays, the template's text after it is added."""
    text = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    after = text.rpartition("<|im_start|>assistant\nx<|im_end|>")[2]
    return ids + tokenizer.encode(after, add_special_tokens=False)


@torch.no_grad()
def sample(model: Any, ids: list[int], end: int, generator: torch.Generator) -> tuple[list[int], list[float]]:
    """Tokens drawn one by one, the end-of-turn token last, with their log-probabilities."""
    output_ids: list[int] = []
    logprobs: list[float] = []
    for place in range(NUM_SAMPLED):
        logprob_v = model(torch.tensor([ids + output_ids])).logits[0, -1].log_softmax(-1)
        drawn = int(torch.multinomial(logprob_v.exp(), 1, generator=generator))
        output_ids.append(end if place == NUM_SAMPLED - 1 else drawn)
        logprobs.append(float(logprob_v[output_ids[-1]]))
    return output_ids, logprobs


def _record(rollout: str, seen: Witnessed, messages: list[dict[str, Any]]) -> ModelCall:
    return ModelCall(
        id=seen.call_id,
        rollout_id=rollout,
        model=RUN,
        run=RUN,
        policy_step=3,
        policy_version=VERSION,
        prompt_ids=seen.prompt_ids,
        output_ids=seen.output_ids,
        logprobs=seen.logprobs,
        finish_reason="stop",
        messages=messages,
    )


def _answer(seen: Witnessed) -> dict[str, Any]:
    entries = [
        {"token_id": token, "logprob": logprob}
        for token, logprob in zip(seen.output_ids, seen.logprobs, strict=True)
    ]
    choice = {
        "token_ids": seen.output_ids,
        "logprobs": {"content": entries},
        "finish_reason": "stop",
        "weight_versions": [{"version": VERSION, "start": 0, "end": len(entries)}],
    }
    usage = {"prompt_tokens": len(seen.prompt_ids), "completion_tokens": len(seen.output_ids)}
    return {"choices": [choice], "usage": usage}
