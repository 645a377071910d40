"""sft, dpo and distill: gradients of the trainer's own passes against losses written out plainly."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from insitu.backend.fleet.rank_info import limits_of
from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.errors import InvalidRequest
from insitu.training.batching import MicroBatch, collate
from insitu.training.objective import objective_of
from insitu.training.packing import Limits, pack_step
from insitu.training.passes import AddUp, Passes, step_metrics
from insitu.types import LoraSettings, StepSettings, TrainingSequence
from tests.support.sequences import altered, make_sequence, train

Make = Callable[..., list[TrainingSequence]]
Gradients = dict[str, Tensor]
EQUAL = 1e-5
LORA = LoraSettings(rank=4, alpha=16, seed=5)
SFT, DPO = StepSettings(method="sft"), StepSettings(method="dpo", dpo_beta=0.3)
DISTILL = StepSettings(method="distill", teacher="other@1")
"""The trainer scores the teacher itself."""
TAUGHT = StepSettings(method="distill", teacher="big")
pytestmark = pytest.mark.timeout(120)


def in_pairs(sequences: list[TrainingSequence]) -> list[TrainingSequence]:
    """Two sequences a rollout; chosen and rejected ones take turns."""
    return [
        replace(
            altered(s, advantages=[(-1.0 if i // 2 % 2 else 1.0) * m for m in s.mask]),
            rollout_id=f"r{i // 2}",
        )
        for i, s in enumerate(sequences)
    ]


@pytest.fixture
def start(model_dir: Path, make_sequences: Make, tmp_path: Path) -> Path:
    """The checkpoint of an adapter that is not the base model any more."""
    rank = TrainerRank(0, 1, "127.0.0.1", 0, str(model_dir), "float32", 1)
    rank.open_run("run", LORA)
    train(rank, "run", make_sequences(6, 9), StepSettings(learning_rate=5e-2))
    rank.save("run", str(tmp_path / "start"))
    return tmp_path / "start"


class Meeting:
    """Adds up the tensors of ranks that are threads."""

    def __init__(self, world_size: int) -> None:
        self._all = threading.Barrier(world_size, timeout=60)
        self._given: dict[int, Tensor] = {}

    def add_up(self, rank: int) -> AddUp:
        def add(tensor: Tensor) -> None:
            self._given[rank] = tensor.clone()
            self._all.wait()
            tensor.copy_(torch.stack([self._given[r] for r in sorted(self._given)]).sum(0))
            self._all.wait()

        return add


def ours(
    model_dir: Path,
    start: Path,
    sequences: list[TrainingSequence],
    settings: StepSettings,
    *,
    budget: int = 4096,
    world_size: int = 1,
    reference: Path | None = None,
) -> tuple[Gradients, dict[str, float]]:
    """The summed gradient of all ranks, and the metrics of the first."""
    meeting = Meeting(world_size)
    loaded: list[TrainerRank] = []
    for _ in range(world_size):
        rank = TrainerRank(0, 1, "127.0.0.1", 0, str(model_dir), "float32", 1, "cpu", budget)
        rank.open_run("run", LORA, str(start))
        loaded.append(rank)

    def one(number: int) -> tuple[Gradients, dict[str, float]]:
        rank = loaded[number]
        packing = pack_step(sequences, settings, limits_of(rank.info()), world_size)
        batch = packing.rank_batch(number)
        batches = [collate(part) for part in batch.parts()]
        objective = objective_of(settings)
        passes = Passes(batches, batch.num_rollouts, objective, settings, meeting.add_up(number), 1.0)
        learner = rank._learner("run")
        with rank._scorer.reference(learner.adapter, reference) as score_reference:
            totals = passes.run(rank._scorer.score, score_reference)
        gradients = {name: p.grad.clone() for name, p in learner.parameters.items() if p.grad is not None}
        return gradients, step_metrics([totals], batch.counts.num_tokens, settings.method)

    with ThreadPoolExecutor(world_size) as ranks:
        answers = list(ranks.map(one, range(world_size)))
    summed = {name: torch.stack([g[name] for g, _ in answers]).sum(0) for name in answers[0][0]}
    assert all(metrics == answers[0][1] for _, metrics in answers)
    return summed, answers[0][1]


class Plain:
    """Stock Transformers and PEFT, one row at a time, all logits."""

    def __init__(self, model_dir: Path, start: Path) -> None:
        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.policy = PeftModel.from_pretrained(base, start / "adapter", is_trainable=True)

    def score(self, sequence: TrainingSequence) -> Tensor:
        """The log-probability of each token in the loss."""
        ids, on = torch.tensor(sequence.token_ids).long(), torch.tensor(sequence.mask[1:])
        logits = self.policy(ids[None]).logits[0, :-1]
        return torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[on, 0]

    def score_base(self, sequence: TrainingSequence) -> Tensor:
        with torch.no_grad(), self.policy.disable_adapter():
            return self.score(sequence)

    def gradients(self) -> Gradients:
        named = self.policy.named_parameters()
        return {n.replace(".default", ""): p.grad.clone() for n, p in named if p.grad is not None}


def sft_loss(plain: Plain, sequences: list[TrainingSequence]) -> Tensor:
    return -torch.cat([plain.score(s) for s in sequences]).mean()


def log_ratios(plain: Plain, sequences: list[TrainingSequence]) -> dict[str, Tensor]:
    ratios: dict[str, Tensor] = {}
    for s in sequences:
        ratio = plain.score(s).sum() - plain.score_base(s).sum()
        ratios[s.rollout_id] = ratios.get(s.rollout_id, torch.zeros(())) + ratio
    return ratios


def dpo_loss(plain: Plain, sequences: list[TrainingSequence], beta: float) -> tuple[Tensor, Tensor]:
    ratios = log_ratios(plain, sequences)
    margins = [beta * (ratios[f"r{i}"] - ratios[f"r{i + 1}"]) for i in range(0, len(ratios), 2)]
    return -logsigmoid(torch.stack(margins)).mean(), torch.stack(margins).detach()


def difference(a: Gradients, b: Gradients) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


LAYOUTS = pytest.mark.parametrize(("budget", "world_size"), [(4096, 1), (24, 1), (24, 2)])


@LAYOUTS
def test_sft_is_the_mean_cross_entropy_of_all_tokens(
    budget: int, world_size: int, model_dir: Path, start: Path, make_sequences: Make
) -> None:
    sequences = [altered(s, advantages=[float(m) for m in s.mask]) for s in make_sequences(8)]
    plain = Plain(model_dir, start)
    loss = sft_loss(plain, sequences)
    loss.backward()
    gradients, metrics = ours(model_dir, start, sequences, SFT, budget=budget, world_size=world_size)
    assert difference(gradients, plain.gradients()) <= EQUAL
    assert metrics.keys() == {"loss", "entropy"}
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)


@LAYOUTS
def test_dpo_is_the_logistic_loss_of_whole_rollouts(
    budget: int, world_size: int, model_dir: Path, start: Path, make_sequences: Make
) -> None:
    sequences = in_pairs(make_sequences(12))
    plain = Plain(model_dir, start)
    loss, margins = dpo_loss(plain, sequences, 0.3)
    loss.backward()
    gradients, metrics = ours(model_dir, start, sequences, DPO, budget=budget, world_size=world_size)
    assert difference(gradients, plain.gradients()) <= EQUAL
    assert metrics.keys() == {"loss", "entropy", "dpo/margin", "dpo/accuracy"}
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["dpo/margin"] == pytest.approx(margins.mean().item(), rel=1e-4)
    assert metrics["dpo/accuracy"] == pytest.approx((margins > 0).float().mean().item())


@LAYOUTS
@pytest.mark.parametrize("by_column", [False, True])
def test_a_teacher_pulls_by_its_difference_whoever_scores_it(
    by_column: bool, budget: int, world_size: int, model_dir: Path, start: Path, make_sequences: Make
) -> None:
    """The base model teaches: as the reference of the trainer, or through its recorded log-probabilities."""
    plain = Plain(model_dir, start)
    sequences: list[TrainingSequence] = []
    taught, num_tokens = torch.zeros(()), 0
    for s in make_sequences(8):
        new, teacher = plain.score(s), plain.score_base(s)
        taught = taught + ((new.detach() - teacher) * new).sum()
        num_tokens += len(new)
        logprobs = torch.zeros(len(s.mask)).masked_scatter(torch.tensor(s.mask), new.detach())
        own = altered(s, advantages=[float(m) for m in s.mask], logprobs=logprobs.tolist())
        sequences.append(replace(own, teacher_t=teacher.numpy()) if by_column else own)
    (taught / num_tokens).backward()
    settings = replace(TAUGHT, teacher="big" if by_column else "other@0")
    gradients, metrics = ours(model_dir, start, sequences, settings, budget=budget, world_size=world_size)
    assert difference(gradients, plain.gradients()) <= EQUAL
    assert {"loss", "entropy", "kl/teacher", "mismatch/kl"} <= metrics.keys()
    assert not {"clip/high_fraction", "kl/reference"} & metrics.keys()
    assert metrics["mismatch/mean_abs"] < 1e-4
    assert metrics["kl/teacher"] == pytest.approx(metrics["loss"], rel=1e-3)


def test_later_passes_of_dpo_and_sft_are_further_steps_of_the_same_loss(
    model_dir: Path, start: Path, make_sequences: Make, tmp_path: Path
) -> None:
    for settings in (replace(SFT, num_passes=3), replace(DPO, num_passes=3)):
        sequences = in_pairs(make_sequences(12))
        if settings.method == "sft":
            sequences = [altered(s, advantages=[float(m) for m in s.mask]) for s in sequences]
        plain = Plain(model_dir, start)
        params = [p for p in plain.policy.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(params, lr=1.0)
        rank = TrainerRank(0, 1, "127.0.0.1", 0, str(model_dir), "float32", 1, "cpu", 24)
        rank.open_run("run", LORA, str(start))
        rank._learner("run").optimizer = torch.optim.SGD(
            list(rank._learner("run").parameters.values()), lr=1.0
        )
        train(rank, "run", sequences, replace(settings, learning_rate=1.0))
        for _ in range(3):
            loss = (
                sft_loss(plain, sequences) if settings.method == "sft" else dpo_loss(plain, sequences, 0.3)[0]
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        named = plain.policy.named_parameters()
        expected = {n.replace(".default", ""): p.detach() for n, p in named if p.requires_grad}
        got = {n: p.detach() for n, p in rank._learner("run").parameters.items()}
        assert difference(got, expected) <= 1e-4


def test_a_reference_may_be_another_run_of_another_rank_and_other_layers(
    model_dir: Path, start: Path, make_sequences: Make, tmp_path: Path
) -> None:
    rank = TrainerRank(0, 1, "127.0.0.1", 0, str(model_dir), "float32", 1)
    rank.open_run("teacher", LoraSettings(rank=2, alpha=4, seed=1, target_modules=["q_proj", "up_proj"]))
    train(rank, "teacher", make_sequences(6, 4), StepSettings(learning_rate=5e-2))
    rank.save("teacher", str(tmp_path / "teacher"))
    rank.open_run("run", LORA, str(start))
    plain_teacher = Plain(model_dir, tmp_path / "teacher")
    plain = [altered(s, advantages=[float(m) for m in s.mask]) for s in make_sequences(8)]
    columns = [replace(s, teacher_t=plain_teacher.score(s).detach().numpy()) for s in plain]
    by_adapter, told = ours(model_dir, start, plain, DISTILL, budget=24, reference=tmp_path / "teacher")
    by_column, same = ours(model_dir, start, columns, TAUGHT, budget=24)
    assert difference(by_adapter, by_column) <= EQUAL
    assert told == pytest.approx(same, rel=1e-4)
    assert told["kl/teacher"] > 0.01


def test_steps_of_each_method_go_through_a_rank(
    trainer: TrainerRank, make_sequences: Make, tmp_path: Path
) -> None:
    """A whole step with its update: the likelihood, the margin and the distance to the teacher move."""
    trainer.open_run("run", LORA)
    ones = [altered(s, advantages=[float(m) for m in s.mask]) for s in make_sequences(8)]
    pairs = in_pairs(make_sequences(12))
    for settings, sequences, name in (
        (SFT, ones, "loss"),
        (DPO, pairs, "loss"),
        (DISTILL, ones, "kl/teacher"),
    ):
        fast = replace(settings, learning_rate=1e-2)
        figures = [train(trainer, "run", sequences, fast)[name] for _ in range(6)]
        assert figures[-1] < figures[0], settings.method
        assert trainer.info()["runs"]["run"]["step"] % 6 == 0


def test_rollouts_that_are_no_pairs_are_refused(trainer: TrainerRank, make_sequences: Make) -> None:
    trainer.open_run("run", LORA)
    pairs = in_pairs(make_sequences(12))
    for wrong in (pairs[:-2], [replace(s, rollout_id="r0") for s in pairs], pairs[2:] + pairs[:2]):
        with pytest.raises(InvalidRequest, match="alternate between chosen and rejected"):
            train(trainer, "run", wrong, DPO)


def test_a_teacher_scores_all_tokens_or_none(trainer: TrainerRank, make_sequences: Make) -> None:
    trainer.open_run("run", LORA)
    made = [replace(s, teacher_t=s.logprobs[s.mask]) for s in make_sequences(4)]
    train(trainer, "run", made, TAUGHT)
    cut = replace(made[1], teacher_t=made[1].logprobs[made[1].mask][1:])
    for wrong, settings in (
        ([*made, cut], TAUGHT),
        (make_sequences(4), TAUGHT),
        (made, DISTILL),
        (made, SFT),
    ):
        with pytest.raises(InvalidRequest, match="that a teacher scored"):
            train(trainer, "run", wrong, settings)


def test_margins_of_long_rollouts_are_exact() -> None:
    """4,000 unlikely tokens of each rollout, the chosen ones a little likelier than in the reference."""
    ids, mask = [1] * 4001, [0] + [1] * 4000
    pair = [make_sequence(side, ids, mask, [0.0] * 4001, float(f"{side}1")) for side in "+-"]
    limits = Limits(97, None, 4096, can_branch=False)
    batches = [collate(part) for part in pack_step(pair, DPO, limits, 1).rank_batch(0).parts()]

    def score(batch: MicroBatch) -> tuple[Tensor, Tensor]:
        logprob_t = (-1000.0 + (batch.advantage_t > 0) * 2.0**-10).requires_grad_()
        return logprob_t, torch.zeros_like(logprob_t)

    def score_reference(batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return torch.full_like(batch.advantage_t, -1000.0), torch.zeros_like(batch.advantage_t)

    totals = Passes(batches, 2, objective_of(DPO), DPO, lambda _: None, 1.0).run(score, score_reference)
    assert totals["dpo/margin"] == pytest.approx(0.3 * 4000 * 2.0**-10, rel=1e-6)


def test_without_a_teacher_nothing_more_is_sent(make_sequences: Make) -> None:
    made, limits = make_sequences(6), Limits(97, 64, 24, can_branch=True)
    scored = [replace(s, teacher_t=s.logprobs[s.mask] - 1.0) for s in made]
    packings = [pack_step(made, StepSettings(), limits, 2), pack_step(scored, TAUGHT, limits, 2)]
    for packing in packings:
        columns = [packing.rank_batch(rank).columns for rank in range(2)]
        arrays = [getattr(each, f.name) for each in columns for f in fields(each)]
        assert packing.num_bytes == sum(array.nbytes for array in arrays if array is not None)
    without, with_teacher = packings
    assert without.rank_batch(0).columns.teacher_t is None
    assert with_teacher.num_bytes - without.num_bytes == 4 * sum(s.num_trained for s in made)
    for part in with_teacher.rank_batch(1).parts():
        batch = collate(part)
        if not batch.is_filler:
            assert batch.teacher_t is not None
            assert torch.equal(batch.teacher_t, batch.sampler_t - 1.0), "each token keeps its own score"


def trl_inputs(rows: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
    """Rows of (ids, mask), padded as TRL's collators do."""
    width = max(len(ids) for ids, _ in rows)

    def padded(lists: list[list[int]]) -> Tensor:
        return torch.tensor([row + [0] * (width - len(row)) for row in lists])

    return {
        "input_ids": padded([ids for ids, _ in rows]),
        "attention_mask": padded([[1] * len(ids) for ids, _ in rows]),
        "completion_mask": padded([mask for _, mask in rows]),
    }


def trl_trainer(kind: str, plain: Plain, folder: Path, row: dict[str, Any], **options: Any) -> Any:
    """A real trainer of TRL on the plain policy."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    if kind == "dpo":
        from trl.trainer.dpo_config import DPOConfig as Config
        from trl.trainer.dpo_trainer import DPOTrainer as Trainer
    else:
        from trl.trainer.sft_config import SFTConfig as Config
        from trl.trainer.sft_trainer import SFTTrainer as Trainer
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(97)}, unk_token="w0"))
    common = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": []}
    return Trainer(
        plain.policy,
        args=Config(str(folder), **common, **options),
        train_dataset=Dataset.from_list([row]),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1"),
    )


def test_sft_has_the_gradient_of_trl(
    model_dir: Path, start: Path, make_sequences: Make, tmp_path: Path
) -> None:
    sequences = [altered(s, advantages=[float(m) for m in s.mask]) for s in make_sequences(8)]
    plain = Plain(model_dir, start)
    theirs = trl_trainer("sft", plain, tmp_path / "trl", {"prompt": "w2", "completion": "w3"})
    inputs = trl_inputs([(s.token_ids.tolist(), s.mask.astype(int).tolist()) for s in sequences])
    mask = inputs.pop("completion_mask")
    inputs["labels"] = inputs["input_ids"].masked_fill(mask == 0, -100)
    loss = theirs.compute_loss(plain.policy, inputs, num_items_in_batch=mask.sum())
    loss.backward()
    gradients, metrics = ours(model_dir, start, sequences, SFT, budget=24)
    assert difference(gradients, plain.gradients()) <= EQUAL
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_dpo_has_the_gradient_of_trl_at_its_default_beta(
    model_dir: Path, start: Path, make_sequences: Make, tmp_path: Path
) -> None:
    pairs = [
        replace(altered(s, advantages=[(-1.0 if i % 2 else 1.0) * m for m in s.mask]), rollout_id=f"r{i}")
        for i, s in enumerate(make_sequences(8))
    ]
    plain = Plain(model_dir, start)
    row = {"prompt": "w2", "chosen": "w3", "rejected": "w4"}
    theirs = trl_trainer("dpo", plain, tmp_path / "trl", row)
    if "ref" in plain.policy.peft_config:  # TRL's reference is the adapter as given; ours is the base model
        plain.policy.delete_adapter("ref")
        plain.policy.set_adapter("default")
    rows = [(s.token_ids.tolist(), s.mask.astype(int).tolist()) for s in pairs]
    loss = theirs.compute_loss(plain.policy, trl_inputs(rows[0::2] + rows[1::2]))
    loss.backward()
    gradients, metrics = ours(model_dir, start, pairs, StepSettings(method="dpo"), budget=24)
    assert difference(gradients, plain.gradients()) <= EQUAL
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
