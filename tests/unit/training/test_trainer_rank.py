"""One rank on a tiny Llama: the step against a plain reference, isolation of runs, skips, scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.errors import Conflict, CorruptCheckpoint, InvalidRequest, NotFound
from insitu.training import passes
from insitu.training.model import loading
from insitu.types import LoraSettings, Loss, StepSettings, TrainingSequence
from tests.support.sequences import altered, make_sequence, train

Make = Callable[..., list[TrainingSequence]]


def adapter_of(trainer: TrainerRank, run: str, directory: Path) -> dict[str, torch.Tensor]:
    trainer.save(run, str(directory))
    return load_file(directory / "adapter" / "adapter_model.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def reference_steps(
    model_dir: Path, lora: LoraSettings, batches: list[list[TrainingSequence]], settings: StepSettings
) -> dict[str, torch.Tensor]:
    """DAPO written out plainly: one row at a time, full logits, autograd, stock PEFT and AdamW."""
    torch.manual_seed(lora.seed)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    policy = get_peft_model(base, config)
    params = [p for p in policy.parameters() if p.requires_grad]
    betas = (0.9, settings.adam_beta2 or 0.999)
    optimizer = torch.optim.AdamW(params, lr=settings.learning_rate, betas=betas, weight_decay=0.0)

    def score(ids: torch.Tensor) -> torch.Tensor:
        logits = policy(ids[None]).logits[0, :-1]
        return torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]

    for batch in batches:
        num_tokens = sum(sum(s.mask) for s in batch)
        with torch.no_grad():
            olds = [score(torch.tensor(s.token_ids)) for s in batch]
        for _ in range(settings.num_passes):
            for s, every_old in zip(batch, olds, strict=True):
                ids, on = torch.tensor(s.token_ids), torch.tensor(s.mask[1:]).bool()
                new, old, sampler = score(ids)[on], every_old[on], torch.tensor(s.logprobs[1:])[on]
                with torch.no_grad(), policy.disable_adapter():
                    base_logprobs = score(ids)[on]
                ratio = torch.exp(new - old)
                advantage = torch.tensor(s.advantages[1:])[on]
                loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                loss = loss * torch.exp(old - sampler).clamp(max=2.0)
                kl = ratio * (torch.exp(base_logprobs - new) - (base_logprobs - new) - 1)
                ((loss + settings.beta * kl).sum() / num_tokens).backward()
            torch.nn.utils.clip_grad_norm_(params, settings.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in get_peft_model_state_dict(policy).items()}


@pytest.mark.parametrize(
    ("beta", "num_passes", "adam_beta2"), [(0.0, 1, None), (0.1, 1, None), (0.0, 3, 0.9), (0.1, 2, None)]
)
def test_steps_equal_the_plain_reference(
    beta: float,
    num_passes: int,
    adam_beta2: float | None,
    trainer: TrainerRank,
    model_dir: Path,
    make_sequences: Make,
    tmp_path: Path,
) -> None:
    lora = LoraSettings(rank=4, alpha=16, seed=5)
    settings = StepSettings(
        learning_rate=1e-2, loss="dapo", beta=beta, num_passes=num_passes, adam_beta2=adam_beta2
    )
    batches = [make_sequences(7, seed) for seed in range(3)]
    expected = reference_steps(model_dir, lora, batches, settings)
    trainer.open_run("run", lora)
    metrics = [train(trainer, "run", batch, settings) for batch in batches][-1]
    assert metrics["learning_rate"] == 1e-2
    assert (metrics["clip/high_fraction"] + metrics["clip/low_fraction"] > 0) == (num_passes > 1)
    got = adapter_of(trainer, "run", tmp_path)
    assert got.keys() == expected.keys(), "PEFT's own names, so that engines load the file"
    assert max((got[n] - expected[n]).abs().max().item() for n in got) <= 2e-5


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"])
def test_every_loss_is_the_same_in_any_packing(
    loss: Loss, model_dir: Path, make_sequences: Make, tmp_path: Path
) -> None:
    """Rollouts of two sequences, three passes: what belongs to a rollout does not stop at a micro-batch."""
    made = make_sequences(8)
    sequences = [replace(s, rollout_id=f"rollout-{i // 2}") for i, s in enumerate(made)]
    settings = StepSettings(learning_rate=1e-2, loss=loss, num_passes=3, entropy_bonus=0.01)
    adapters: list[dict[str, torch.Tensor]] = []
    for budget in (1, 40, 4096):
        rank = TrainerRank(0, 1, "127.0.0.1", 0, str(model_dir), "float32", 1, "cpu", budget)
        rank.open_run("run", LoraSettings())
        train(rank, "run", sequences, settings)
        adapters.append(adapter_of(rank, "run", tmp_path / str(budget)))
    for other in adapters[1:]:
        assert max((adapters[0][n] - other[n]).abs().max().item() for n in other) <= 2e-5


def test_a_checkpoint_is_the_reference_of_the_penalty(
    trainer: TrainerRank, make_sequences: Make, tmp_path: Path
) -> None:
    settings = StepSettings(learning_rate=1e-2, beta=0.1)
    trainer.open_run("run", LoraSettings())
    train(trainer, "run", make_sequences(6), settings)
    trainer.save("run", str(tmp_path / "then"))
    to_itself = train(trainer, "run", make_sequences(6, 1), settings, str(tmp_path / "then"))
    assert to_itself["kl/reference"] == pytest.approx(0.0, abs=1e-6), "the policy is its own reference"
    later = train(trainer, "run", make_sequences(6, 2), settings, str(tmp_path / "then"))
    to_base = train(trainer, "run", make_sequences(6, 2), settings)
    assert 0 < later["kl/reference"] < to_base["kl/reference"]


def test_metrics_describe_the_batch(trainer: TrainerRank, make_sequences: Make) -> None:
    sequences = make_sequences(5)
    trainer.open_run("run", LoraSettings())
    scores = trainer.score("run", [s.token_ids.tolist() for s in sequences])
    metrics = train(trainer, "run", sequences, StepSettings(learning_rate=1e-2))
    pairs = [
        (scores[k][i - 1], s.logprobs[i])
        for k, s in enumerate(sequences)
        for i, flag in enumerate(s.mask)
        if flag
    ]
    assert metrics["num_tokens"] == len(pairs)
    assert metrics["num_sequences"] == 5
    assert metrics["mismatch/mean_abs"] == pytest.approx(
        sum(abs(n - o) for n, o in pairs) / len(pairs), rel=1e-4
    )
    kl = sum(math.exp(n - o) - (n - o) - 1 for n, o in pairs) / len(pairs)
    assert metrics["mismatch/kl"] == pytest.approx(kl, rel=1e-4)
    assert 0 < metrics["entropy"] < math.log(97)
    assert metrics["updated"] == 1
    assert metrics["skipped"] == 0
    assert metrics["time/train_seconds"] > 0


def test_the_size_of_micro_batches_does_not_matter(
    model_dir: Path, make_sequences: Make, tmp_path: Path
) -> None:
    adapters: list[dict[str, torch.Tensor]] = []
    for budget in (1, 40, 4096):
        rank = TrainerRank(0, 1, "127.0.0.1", 0, str(model_dir), "float32", 1, "cpu", budget)
        rank.open_run("run", LoraSettings())
        train(rank, "run", make_sequences(8), StepSettings(learning_rate=1e-2))
        adapters.append(adapter_of(rank, "run", tmp_path / str(budget)))
    for other in adapters[1:]:
        assert max((adapters[0][n] - other[n]).abs().max().item() for n in other) <= 1e-5


def test_runs_keep_adapter_and_optimizer_apart(
    trainer: TrainerRank, make_sequences: Make, tmp_path: Path
) -> None:
    settings = StepSettings(learning_rate=1e-2)
    trainer.open_run("alone", LoraSettings(seed=1))
    for seed in range(3):
        train(trainer, "alone", make_sequences(4, seed), settings)
    alone = adapter_of(trainer, "alone", tmp_path / "alone")
    trainer.close_run("alone")
    trainer.open_run("a.b-c", LoraSettings(seed=1))
    trainer.open_run("other", LoraSettings(rank=2, seed=9))
    for seed in range(3):
        train(trainer, "a.b-c", make_sequences(4, seed), settings)
        train(trainer, "other", make_sequences(3, 50 + seed), StepSettings(learning_rate=0.5))
        trainer.score("other", [[1, 2, 3]], adapter=False)
    assert equal(alone, adapter_of(trainer, "a.b-c", tmp_path / "shared"))
    assert not equal(alone, adapter_of(trainer, "other", tmp_path / "other"))


def test_zero_advantages_change_nothing(trainer: TrainerRank, make_sequences: Make, tmp_path: Path) -> None:
    trainer.open_run("run", LoraSettings())
    train(trainer, "run", make_sequences(4), StepSettings(learning_rate=1e-2))  # momentum to betray it
    before = adapter_of(trainer, "run", tmp_path / "before")
    flat = [altered(s, advantages=[0.0] * len(s.mask)) for s in make_sequences(4, 1)]
    metrics = train(trainer, "run", flat, StepSettings(learning_rate=1e-2))
    assert metrics["num_sequences"] == metrics["updated"] == metrics["skipped"] == 0
    assert equal(before, adapter_of(trainer, "run", tmp_path / "after"))
    assert trainer.info()["runs"]["run"]["step"] == 2


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_skipped_bit_for_bit(
    poison: float, trainer: TrainerRank, make_sequences: Make, tmp_path: Path
) -> None:
    settings = StepSettings(learning_rate=1e-2)
    trainer.open_run("run", LoraSettings())
    train(trainer, "run", make_sequences(4), settings)
    trainer.save("run", str(tmp_path / "before"))
    bad = make_sequences(4, 1)
    bad[2] = altered(bad[2], advantages=[poison] * len(bad[2].mask))
    metrics = train(trainer, "run", bad, settings)
    assert (metrics["skipped"], metrics["updated"]) == (1, 0)
    assert all(math.isfinite(value) for value in metrics.values())
    trainer.save("run", str(tmp_path / "after"))
    for file in ("adapter/adapter_model.safetensors", "optimizer.safetensors", "optimizer.json"):
        assert (tmp_path / "before" / file).read_bytes() == (tmp_path / "after" / file).read_bytes()
    assert train(trainer, "run", make_sequences(4, 2), settings)["updated"] == 1


def test_score_by_policy_and_by_base(
    trainer: TrainerRank, model_dir: Path, make_sequences: Make, tmp_path: Path
) -> None:
    trainer.open_run("run", LoraSettings())
    train(trainer, "run", make_sequences(6), StepSettings(learning_rate=5e-2))
    trainer.save("run", str(tmp_path))
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    rows = [[1, 2, 3, 4, 5], [7], [9, 8], []]

    def expected(model: torch.nn.Module, ids: list[int]) -> list[float]:
        tensor = torch.tensor([ids])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(tensor).logits[0, :-1], -1)
        return logprobs.gather(-1, tensor[0, 1:, None])[:, 0].tolist()

    by_base = trainer.score("run", rows, adapter=False)
    assert [len(row) for row in by_base] == [4, 0, 1, 0]
    assert by_base[0] == pytest.approx(expected(base, rows[0]), abs=1e-5)
    tuned = PeftModel.from_pretrained(base, tmp_path / "adapter")
    by_policy = trainer.score("run", rows)
    assert by_policy[0] == pytest.approx(expected(tuned, rows[0]), abs=1e-5)
    assert max(abs(a - b) for a, b in zip(by_policy[0], by_base[0], strict=True)) > 1e-3


def test_wrong_input_is_refused_with_its_value(trainer: TrainerRank) -> None:
    trainer.open_run("run", LoraSettings())
    sequence = make_sequence("r1", [1, 2], [0, 1], [0.0, -1.0], 1.0)
    for columns, message in [
        ({"logprobs": [0.0]}, "1 logprobs"),
        ({"advantages": [0.0]}, "1 advantages"),
        ({"constrained": []}, "0 constrained"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            altered(sequence, **columns)
    for bad, message in [
        (altered(sequence, mask=[1, 1]), "first token"),
        (make_sequence("r1", [1] * 65, [0] * 64 + [1], [0.0] * 65, 1.0), "65 tokens"),
        (altered(sequence, token_ids=[1, 97]), "token id 97"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            train(trainer, "run", [bad], StepSettings())
    with pytest.raises(NotFound, match="nobody"):
        train(trainer, "nobody", [sequence], StepSettings())


def test_a_checkpoint_of_another_run_or_with_damage_is_refused(
    trainer: TrainerRank, make_sequences: Make, tmp_path: Path
) -> None:
    trainer.open_run("run", LoraSettings())
    train(trainer, "run", make_sequences(4), StepSettings())
    trainer.save("run", str(tmp_path))
    with pytest.raises(Conflict, match="belongs to"):
        trainer.open_run("run2", LoraSettings(), str(tmp_path))
    with pytest.raises(Conflict, match="belongs to"):
        trainer.open_run("run", LoraSettings(rank=4), str(tmp_path))
    for name in (
        "adapter/adapter_model.safetensors",
        "optimizer.safetensors",
        "rng.safetensors",
        "state.json",
    ):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CorruptCheckpoint, match=Path(name).name):
            trainer.open_run("run", LoraSettings(), str(tmp_path))
        (tmp_path / name).write_bytes(whole)
    assert trainer.open_run("run", LoraSettings(), str(tmp_path)) == 1


def test_half_precision_has_the_gradient_of_float32(model_dir: Path, make_sequences: Make) -> None:
    norms: dict[str, float] = {}
    for dtype in ("float32", "float16", "bfloat16"):
        rank = TrainerRank(0, 1, "127.0.0.1", 0, str(model_dir), dtype, 1, "cpu", 4096)
        rank.open_run("run", LoraSettings())
        metrics = train(rank, "run", make_sequences(8), StepSettings(max_grad_norm=1e9))
        norms[dtype] = metrics["grad_norm"]
    assert norms["float16"] == pytest.approx(norms["float32"], rel=0.005)
    assert norms["bfloat16"] == pytest.approx(norms["float32"], rel=0.05)


def test_checkpointed_layers_change_nothing_but_memory(
    model_dir: Path, tmp_path: Path, make_sequences: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Branching rows included: the mask reaches a layer that is computed a second time."""
    adapters: list[dict[str, torch.Tensor]] = []
    computed_again: list[int] = []
    own = loading.checkpoint

    def counted(*args: Any, **kwargs: Any) -> Any:
        computed_again[-1] += 1
        return own(*args, **kwargs)

    monkeypatch.setattr(loading, "checkpoint", counted)
    settings = [(False, 0), (True, 0), (True, 14)]  # the last: some micro-batches keep their layers
    for number, (checkpoint_layers, kept_tokens) in enumerate(settings):
        computed_again.append(0)
        trainer = TrainerRank(
            *(0, 1, "127.0.0.1", 0, str(model_dir), "float32", 1, "cpu", 16, checkpoint_layers),
            kept_tokens=kept_tokens,
        )
        trainer.open_run("run", LoraSettings(rank=4))
        for step in range(2):
            train(trainer, "run", make_sequences(6, step), StepSettings(learning_rate=1e-2, beta=0.05))
        adapters.append(adapter_of(trainer, "run", tmp_path / str(number)))
    assert equal(adapters[0], adapters[1])
    assert equal(adapters[0], adapters[2])
    none, every, some = computed_again
    assert none == 0 < some < every, computed_again


def test_base_is_in_the_runs_precision_and_adapters_in_float32(model_dir: Path, make_sequences: Make) -> None:
    trainer = TrainerRank(0, 1, "127.0.0.1", 0, str(model_dir), "bfloat16", 1, "cpu", 64)
    trainer.open_run("run", LoraSettings(rank=4))
    assert train(trainer, "run", make_sequences(), StepSettings(learning_rate=1e-3))["updated"] == 1
    dtypes = {p.requires_grad: p.dtype for p in trainer._policy.parameters()}
    assert dtypes == {False: torch.bfloat16, True: torch.float32}


def test_failed_step_leaves_nothing_in_memory(
    trainer: TrainerRank, tmp_path: Path, make_sequences: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error at the second micro-batch must not leave the first one's gradient to the next step."""
    lora, settings = LoraSettings(rank=4), StepSettings(learning_rate=1e-2)
    trainer.open_run("run", lora)
    train(trainer, "run", make_sequences(12, 1), settings)
    expected = adapter_of(trainer, "run", tmp_path / "expected")
    real, calls = passes.forward_backward, iter([False, True])

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls):
            raise torch.OutOfMemoryError("no memory")
        return real(*args, **kwargs)

    trainer.open_run("run", lora)
    with monkeypatch.context() as patched:
        patched.setattr(passes, "forward_backward", failing)
        with pytest.raises(torch.OutOfMemoryError):
            train(trainer, "run", make_sequences(12, 1), settings)
    with pytest.raises(NotFound, match="run run is not open"):
        train(trainer, "run", make_sequences(12, 1), settings)
    trainer.open_run("run", lora)
    train(trainer, "run", make_sequences(12, 1), settings)
    assert equal(adapter_of(trainer, "run", tmp_path / "again"), expected)
