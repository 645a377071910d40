"""A Llama small enough for milliseconds, built in the test's own directory: no download, no cache.

Torch and Transformers are imported by the fixtures that need them: tests of pure functions start without.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from insitu.types import TrainingSequence
from tests.support.sequences import make_sequence

if TYPE_CHECKING:
    import torch

    from insitu.backend.fleet.trainer_rank import TrainerRank


def _build(directory: Path, tied: bool = True, dtype: torch.dtype | None = None) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).to(dtype or torch.float32).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tmp_path_factory.mktemp("model"))


@pytest.fixture
def build_model() -> Callable[..., Path]:
    return _build


@pytest.fixture
def trainer(model_dir: Path) -> TrainerRank:
    from insitu.backend.fleet.trainer_rank import TrainerRank

    return TrainerRank(0, 1, "127.0.0.1", 0, str(model_dir), "float32", 1, "cpu", 64)


@pytest.fixture
def make_sequences() -> Callable[..., list[TrainingSequence]]:
    def make(count: int = 6, seed: int = 0) -> list[TrainingSequence]:
        """Rollouts with prompts of their own and, every second one, the prompt of the rollout before."""
        rng = random.Random(seed)
        prompt: list[int] = []
        made: list[TrainingSequence] = []
        for i in range(count):
            prompt = prompt if i % 2 else [rng.randrange(97) for _ in range(rng.randint(1, 12))]
            num_prompt, num_output = len(prompt), rng.randint(1, 6)
            ids = prompt + [rng.randrange(97) for _ in range(num_output)]
            logprobs = [0.0] * num_prompt + [-4.0 - rng.random() for _ in range(num_output)]
            mask = [0] * num_prompt + [1] * num_output
            made.append(make_sequence(f"rollout-{i}", ids, mask, logprobs, rng.choice([-1.0, 0.5])))
        return made

    return make
