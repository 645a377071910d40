"""`python -m insitu.doctor.trainer_side MODEL DIRECTORY`: run the checks of the trainer's side, then exit.

A process of its own gives its memory on the device back before the engine starts. The report goes to
`DIRECTORY/report.json`, the trained adapter to `DIRECTORY/checkpoint/adapter`.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, cast

import torch

from insitu.backend.fleet.rank_info import limits_of
from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.backend.plan.compute import Asked, Compute, choose
from insitu.backend.plan.cpu import read_cpu
from insitu.backend.plan.engine import Device
from insitu.doctor.finding import NO_CUDA, Figure, Finding, failed, measured, skipped
from insitu.doctor.trainer_report import Lesson, Scores, TrainerReport
from insitu.errors import ChildFailed, InsituError, describe, foreign_code
from insitu.system.torch_builds.installing import install_command
from insitu.training.attention_check import AttentionShape, attention_shape, tree_row_error
from insitu.training.model.branch_verdict import device_name, keep_verdict, vllm_version
from insitu.training.model.loading import model_directory
from insitu.training.packing import pack_step
from insitu.training.sequences import sequence_of
from insitu.types import LoraSettings, StepSettings, TrainingSequence
from insitu.wire.message import encode

REPORT = "report.json"

_COMMON_SHAPES = (AttentionShape(4, 2, 64), AttentionShape(4, 1, 128))
"""Head sizes of most models; the model's own is checked too."""
_MAX_TOKENS = 96
_LEARNING_RATE = 3e-3
"""Large enough for one step to be seen in bfloat16."""
_TEXTS = (
    "The harbour was quiet when the ferry arrived. Two men unloaded crates of apples, and a third counted "
    "them aloud in a language that nobody on the pier understood.",
    "To compute the area of a triangle, multiply the length of its base by its height and divide the result "
    "by two. For a base of 6 and a height of 5 the area is 15.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n\nprint(mean([1, 2, 3]))",
    "Question: which planet is the largest of the solar system? Answer: Jupiter, whose mass is more than "
    "twice that of all the other planets together.",
)


def main() -> None:
    model, directory = sys.argv[1], Path(sys.argv[2])
    (directory / REPORT).write_bytes(encode(check(model, directory)))


def check(model: str, directory: Path) -> TrainerReport:
    """Run every check; one that fails does not keep the next from running."""
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    capability = float("{}.{}".format(*torch.cuda.get_device_capability())) if device == "cuda" else None
    compute = choose(read_cpu(), device, Asked(), capability=capability)
    findings = [_device(device, has_nvidia=Path("/dev/nvidiactl").exists())]
    findings += _attention(model, torch.device(device), compute)
    lesson = None
    try:
        with foreign_code(lambda error: ChildFailed(describe(error))):
            finding, lesson = _train(model, device, compute, directory / "checkpoint")
    except InsituError as error:
        finding = failed("training step", error, hint="try a smaller model: insitu doctor --device --model …")
    return TrainerReport(device, compute.dtype, [*findings, finding], lesson)


def _device(device: Device, *, has_nvidia: bool) -> Finding:
    """Name the device; fail if there is one that torch cannot use."""
    versions = f"torch {torch.__version__}, vllm {vllm_version()}"
    if has_nvidia and device == "cpu":
        return Finding(
            "device",
            "failed",
            detail=f"this machine has an NVIDIA device that torch cannot use ({versions})",
            hint=f"{install_command('insitu[backend]')}, then nvidia-smi to see the driver's version",
        )
    return Finding("device", "ok", detail=f"{device_name(torch.device(device))}, {versions}")


def _attention(model: str, device: torch.device, compute: Compute) -> list[Finding]:
    """Compare rows with branches with dense SDPA at every head size; keep the verdicts for the trainer."""
    dtype: torch.dtype = getattr(torch, compute.dtype)
    try:
        shapes = {shape.head_size: shape for shape in (*_COMMON_SHAPES, attention_shape(model))}
    except InsituError as error:
        return [failed("tree rows", error, hint="check --model")]
    findings = [_tree_rows(shape, device, dtype) for _, shape in sorted(shapes.items())]
    if device.type == "cpu":
        findings.append(skipped("flex attention", NO_CUDA))
    return findings


def _tree_rows(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> Finding:
    path = "flex attention" if device.type == "cuda" else "block attention"
    name = f"{path}, head {shape.head_size}"
    hint = "sequences are trained in rows of their own here; report the device and versions above"
    # a check that crashes this process has failed, too
    keep_verdict(device, shape.head_size, holds=False, detail=f"{path} did not finish its check")
    try:
        with foreign_code(lambda error: ChildFailed(describe(error))):
            error = tree_row_error(shape, device, dtype)
    except InsituError as problem:
        finding = failed(name, problem, hint=hint)
    else:
        figures = [
            Figure("values", _finite(error.value), error.value_bound),
            Figure("gradients", _finite(error.gradient), error.gradient_bound),
        ]
        finding = measured(
            name, figures, hint=hint, detail=f"against dense SDPA in {str(dtype).removeprefix('torch.')}"
        )
    said = ", ".join(map(str, finding.figures)) or finding.detail
    keep_verdict(device, shape.head_size, holds=finding.state == "ok", detail=f"{path}: {said}")
    return finding


def _train(model: str, device: Device, compute: Compute, checkpoint: Path) -> tuple[Finding, Lesson]:
    """Take one real step on texts with common prefixes, and save its adapter as for an engine."""
    rank = TrainerRank(0, 1, "127.0.0.1", 0, model, compute.dtype, compute.rank_threads, device)
    rank.open_run("doctor", LoraSettings())
    fixed = _token_ids(model)
    before = rank.score("doctor", fixed, adapter=False)
    siblings = _siblings(fixed)
    sampled = rank.score("doctor", siblings)
    settings, info = StepSettings(learning_rate=_LEARNING_RATE), rank.info()
    packing = pack_step(_sequences(siblings, sampled), settings, limits_of(info), info["world_size"])
    metrics = rank.train_step("doctor", packing.rank_batch(0), settings)
    after = rank.score("doctor", fixed)
    rank.save("doctor", str(checkpoint))
    change = _mean_change(before, after)
    holds = metrics["updated"] == 1 and change > 0 and math.isfinite(change)
    finding = Finding(
        "training step",
        "ok" if holds else "failed",
        [Figure("mean |Δlogprob|", _finite(change))],
        f"{Path(model).name} in {compute.dtype}, {metrics['time/train_seconds']:.1f} s",
        "" if holds else "the step changed nothing: try another --model, then report it",
    )
    return finding, Lesson(str(checkpoint / "adapter"), fixed, before, after)


def _token_ids(model: str) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = cast(Any, AutoTokenizer).from_pretrained(model_directory(model), trust_remote_code=False)
    return [tokenizer(text)["input_ids"][:_MAX_TOKENS] for text in _TEXTS]


def _siblings(fixed: list[list[int]]) -> list[list[int]]:
    """Continue each text's first half with its own second half and with that of the next text."""
    ends = [*fixed[1:], fixed[0]]
    other = [mine[: len(mine) // 2] + end[len(end) // 2 :] for mine, end in zip(fixed, ends, strict=True)]
    return [*fixed, *other]


def _sequences(rows: list[list[int]], scores: Scores) -> list[TrainingSequence]:
    """Reward each text's own ending over the foreign one."""
    made: list[TrainingSequence] = []
    for index, (ids, logprobs) in enumerate(zip(rows, scores, strict=True)):
        num_prompt = len(ids) // 2
        mask = [int(place >= num_prompt) for place in range(len(ids))]
        sampled = [score * flag for score, flag in zip([0.0, *logprobs], mask, strict=True)]
        advantage = 1.0 if index < len(rows) // 2 else -1.0
        advantages = [advantage * flag for flag in mask]
        made.append(sequence_of(f"rollout-{index}", ids, mask, sampled, advantages, [0] * len(ids)))
    return made


def _mean_change(before: Scores, after: Scores) -> float:
    gaps = [abs(y - x) for a, b in zip(before, after, strict=True) for x, y in zip(a, b, strict=True)]
    return math.fsum(gaps) / len(gaps)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


if __name__ == "__main__":
    main()
